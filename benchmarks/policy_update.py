"""Time until engines compute with a new policy from the trainer ranks of other GPUs, at full size.

    timeout 400 python -m benchmarks policy_update OUT.json                         # two GPUs: a rank, an engine
    timeout 400 python -m benchmarks policy_update OUT.json --ranks 2 --engines 2   # four GPUs

Needs a GPU per rank and engine, or runs on CPUs. Trainer (FSDP2, experts sharded over its ranks) and engines start with
different random weights, so no checkpoint is needed. After an update all give the same tokens the same log-
probabilities. `wait` is the time until the session begins, `sent` the trainer's part of it, `load` the engine's part
until the weights are active, and `pause` the time without generation, each of the slowest engine. The other parts
follow one another during the pause. `groups` counts the process groups made: one, unless the group was not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import ranks
from benchmarks.support.machine import machine, versions
from benchmarks.support.ports import free_port
from benchmarks.support.servers import Server, start_engine
from benchmarks.support.timed_client import TimedClient
from benchmarks.training_models import SHAPES
from primeslurm.nn import compat
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.weight_updates.sessions import TransferSessions
from primeslurm.orchestrator.worker.generate_endpoint import Completion, GenerateEndpoint
from primeslurm.plan.commands.command import Device
from primeslurm.plan.commands.engine import ALONE, Engines
from primeslurm.plan.gpus import ALLOC_CONF
from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly import build
from primeslurm.trainer.base.interrupt import SIGNAL
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weight_senders.collective_sender import Sender
from primeslurm.trainer.weights.export import published
from primeslurm.wire.link.messages import Answer, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.link.trainer_link import TrainerLink

UPDATES = 5
SEQ_LEN = 1024
PROMPT = [(7 * i) % 1000 + 3 for i in range(64)]
TIMEOUT_S = 180.0
# Variables of trainer ranks, which engines must not inherit.
_OF_RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *ALLOC_CONF,
)


def recipe(model: Path, options: argparse.Namespace, dtype: str) -> Recipe:
    """Return the recipe of engines and trainer."""
    inference = {
        "enforce_eager": True,
        "kv_cache_bytes": 2**31,
        "quantization": "fp8" if options.fp8 else None,
        "env": {"VLLM_DEEP_GEMM_WARMUP": "skip"},
        "vllm_extra": {"load_format": "dummy"},
    }
    sections = {
        "seq_len": SEQ_LEN,
        "model": {"path": str(model), "dtype": dtype},
        "environments": [{"id": "reverse-text"}],
        "trainer": {"parallelism": {"ep": options.ranks}},
        "weights": {"transport": "nccl", "timeout_s": TIMEOUT_S},
    }
    return Recipe.model_validate({"name": "policy-update", "max_steps": 1, "inference": inference, **sections})


def start_engines(run_recipe: Recipe, device: Device, options: argparse.Namespace, first_gpu: int) -> list[Server]:
    """Start the engines, each on its own GPU if there are any, beginning with `first_gpu`."""
    unset = [word for name in _OF_RANKS for word in ("-u", name)]
    command = Engines(run_recipe, device, "engine", sys.executable).command(ALONE)
    command = command._replace(argv=("env", *unset, *command.argv))
    logs = [options.out.with_suffix(f".engine-{number}.log") for number in range(options.engines)]
    return [start_engine(command, log, first_gpu + number) for number, log in enumerate(logs)]


async def sampled(servers: Sequence[Server]) -> list[Completion]:
    """Return a greedy completion of each engine."""

    async def one(server: Server) -> Completion:
        endpoint = GenerateEndpoint(lambda: server.url, SEQ_LEN, timeout_s=TIMEOUT_S, routed=False)
        sampling = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
        request = {"token_ids": PROMPT, "cache_salt": str(time.monotonic()), "sampling_params": sampling}
        answer = await endpoint.generate(request, {})
        await endpoint.close()
        return answer

    return list(await asyncio.gather(*map(one, servers)))


def difference(answers: Sequence[Completion] | None, policy: PolicyModel, world: World) -> float:
    """Return the mean difference of log-probabilities between trainer and engine, for the worst engine.

    All ranks call this together. `answers` are the engines' completions, on rank 0.
    """
    largest = 0.0
    for answer in world.share(answers) or []:
        ids = torch.tensor([PROMPT + list(answer.token_ids)], device=policy.device)
        with torch.no_grad():
            logits = policy.logits(ids, torch.arange(ids.shape[1], device=policy.device)[None])[0]
        likely = logits.float().log_softmax(-1)[0, len(PROMPT) - 1 : -1]
        found = likely.gather(1, ids[0, len(PROMPT) :, None]).squeeze(1)
        largest = max(largest, float((found.cpu() - torch.tensor(answer.logprobs)).abs().mean()))
    return largest


async def updates(
    servers: Sequence[Server], run_recipe: Recipe, sender: Callable[[str], Sender], meet: Callable[[str], None]
) -> list[dict[str, float]]:
    """Send the policy several times, as rank 0. The first update also connects.

    Args:
        sender: makes this rank's sender from the orchestrator's address.
        meet: called when the other ranks may send.

    Returns:
        Seconds of each update, by part.
    """
    sessions = TransferSessions(workers=1, timeout_s=TIMEOUT_S)
    wanting: set[EngineClient] = set()

    async def handle(request: Request) -> Answer:
        return await sessions.answer(request, lambda: len(wanting), 4)  # type: ignore[arg-type]

    address = f"tcp://127.0.0.1:{free_port()}"
    serving = asyncio.create_task(OrchestratorLink(address, handle).serve())
    sends = sender(address)

    def client_of(server: Server) -> TimedClient:
        return TimedClient(lambda: server.url, run_recipe.model.path, sessions)

    clients = [client_of(server) for server in servers]

    async def apply(client: EngineClient, number: int) -> None:
        await client.apply(PolicyVersion(number, ""), TIMEOUT_S)
        wanting.discard(client)

    rows = []
    for number in range(1, UPDATES + 1):
        wanting |= set(clients)
        sessions.expect(number)
        await asyncio.to_thread(meet, f"update {number}")
        begun = time.monotonic()
        sending = asyncio.create_task(asyncio.to_thread(sends.send, number))
        await asyncio.gather(*(apply(client, number) for client in clients))
        total = time.monotonic() - begun
        assert await sending == 1
        parts = [client.seconds | client.parts(sends.seconds, sends.connect_seconds) for client in clients]
        slowest = {part: max(each[part] for each in parts) for part in parts[0]}
        rows.append({"total": total, "sent": sends.seconds, **slowest, "groups": sends.groups})
        print(number, {part: round(value, 3) for part, value in rows[-1].items()}, flush=True)
    serving.cancel()
    return rows


async def opened(servers: Sequence[Server], run_recipe: Recipe) -> list[Completion]:
    """Make the engines serve their initial weights, and return their completions."""

    async def open_up(server: Server) -> None:
        client = EngineClient(lambda: server.url, run_recipe.model.path)
        await client.apply(PolicyVersion(0, run_recipe.model.path), TIMEOUT_S)

    await asyncio.gather(*map(open_up, servers))
    return await sampled(servers)


def send_and_compare(
    servers: Sequence[Server], run_recipe: Recipe, policy: PolicyModel, world: World
) -> tuple[list[dict[str, float]], list[float]]:
    """Send the policy several times with all ranks. Only rank 0 has `servers`.

    Returns:
        Seconds of each update (on rank 0), and the difference of log-probabilities before and after.
    """

    def sender(address: str) -> Sender:
        return Sender(policy, published(run_recipe, frozenset()), TrainerLink(address), world, TIMEOUT_S)

    def meet(what: str) -> None:
        world.agree(None, what)

    before = difference(asyncio.run(opened(servers, run_recipe)) if world.is_main else None, policy, world)
    rows: list[dict[str, float]] = []
    if world.is_main:
        rows = asyncio.run(updates(servers, run_recipe, sender, meet))
    else:
        sends = sender("tcp://127.0.0.1:1")  # only rank 0 talks to the orchestrator
        for number in range(1, UPDATES + 1):
            meet(f"update {number}")
            sends.send(number)
    after = difference(asyncio.run(sampled(servers)) if world.is_main else None, policy, world)
    return rows, [before, after]


def measure(options: argparse.Namespace, world: World) -> dict[str, Any]:
    """Measure with all ranks. Rank 0 starts the engines."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})  # otherwise engines would start with the signal blocked
    shape = SHAPES[options.shape]
    servers: list[Server] = []
    config = shape.build(options.layers, None, None)
    config.architectures = [shape.config.__name__.replace("Config", "ForCausalLM")]
    device: Device = "cpu" if compat.ON_CPU else "cuda"
    with tempfile.TemporaryDirectory() as name:
        model = Path(world.share(name))
        run_recipe = recipe(model, options, "float32" if compat.ON_CPU else "bfloat16")
        try:
            if world.is_main:
                config.save_pretrained(model)
                servers += start_engines(run_recipe, device, options, world.size)
            world.barrier()
            torch.manual_seed(0)
            policy = build.assemble(config, model, run_recipe, world)
            for server in servers:
                server.wait("/primeslurm/status", timeout_s=300)
            rows, differences = send_and_compare(servers, run_recipe, policy, world)
        finally:
            for server in servers:
                server.stop()
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    found: dict[str, Any] = {
        "machine": f"{machine()}; trainer ranks: {world.size}, engines: {options.engines}",
        "versions": versions("torch", "vllm"),
        "parameters": parameters,
        "gigabytes": round(parameters * (1 if options.fp8 else policy.dtype.itemsize) / 1e9, 2),
    }
    if world.is_main:
        medians = {part: round(statistics.median(row[part] for row in rows[1:]), 3) for part in rows[0]}
        found |= {"first_seconds": rows[0]["total"], "groups": medians.pop("groups"), "median_seconds": medians}
    return {**found, "difference": differences}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks policy_update", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["qwen3_30b_a3b", "qwen3_4b", "tiny"], default="qwen3_30b_a3b")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--fp8", action="store_true", help="the engines compute in FP8, and are sent FP8")
    options = parser.parse_args(words)
    ranks.run("policy_update", words, options.ranks, options.out, lambda world: measure(options, world))
