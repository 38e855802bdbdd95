"""Seconds of a policy update with many experts: `python -m benchmarks.gpu_weights [OUT.json]` (minutes, no network).

One trainer rank sends to one vLLM engine, whose workers have the other GPUs (on a machine without: gloo between CPUs).
The model has Qwen3-30B-A3B's 48 x 128 experts, but thin ones: `--hidden 2048 --inner 768` makes them as they are, and
`--layers` fewer. `--inference` adds to that section of the recipe, as in '{"parallel": {"tp": 2}}'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PRIMESLURM_SECRET", "0" * 64)

from primeslurm.trainer import compat  # noqa: F401  isort: skip  (before torchtitan)
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.weight_update import TimedClient
from primeslurm.orchestrator.delivery import Delivery
from primeslurm.orchestrator.engines import Policy
from primeslurm.recipe import Recipe
from primeslurm.trainer.encoding import published
from primeslurm.trainer.interrupt import SIGNAL, Interrupt
from primeslurm.trainer.parallel import build
from primeslurm.trainer.sender import Sender
from primeslurm.trainer.world import World, join
from primeslurm.wire.link import Answer, OrchestratorLink, Request, TrainerLink
from tests.support.engine_commands import engine_command
from tests.support.processes import Server, free_port, start_process
from tests.support.ranks import rank_environment

GPUS = torch.cuda.device_count()
EXPERTS = 128


def main() -> None:
    """Measure, print, and write if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=128, help="width of an expert")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--inference", type=json.loads, default={}, metavar="JSON")
    options = parser.parse_args()
    os.environ |= rank_environment(0, 1, free_port())
    world = join(Interrupt(), patience_s=600)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", options)
        asked = recipe(model, options.inference)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        rows = asyncio.run(updates(asked, Path(name), world, options.updates))
    world.close()
    result = {
        "command": "python -m benchmarks.gpu_weights " + " ".join(sys.argv[1:]),
        "machine": f"{GPUS} x {torch.cuda.get_device_name()}" if GPUS else f"{os.cpu_count()} CPU cores",
        "load_1m": os.getloadavg()[0],
        "gigabytes": size / 1e9,
        "expert_tensors": options.layers * EXPERTS * 3,
        "seconds": rows,
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def write_model(directory: Path, options: argparse.Namespace) -> Path:
    """A random Qwen3-MoE in bfloat16."""
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=options.hidden,
        intermediate_size=options.hidden,
        moe_intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda" if GPUS else "cpu"):
        Qwen3MoeForCausalLM._from_config(config).save_pretrained(directory)
    torch.cuda.empty_cache()
    return directory


def recipe(model: Path, inference: dict[str, Any]) -> Recipe:
    """Engines that are sent their policies."""
    room = {"gpu_memory_utilization": 0.7} if GPUS else {"kv_cache_bytes": 2**29}
    return Recipe.model_validate(
        {
            "name": "gpu-weights",
            "max_steps": 2,
            "seq_len": 1024,
            "model": {"path": str(model), "dtype": "bfloat16"},
            "environments": [{"id": "reverse-text"}],
            "weights": {"transport": "nccl", "timeout_s": 300},
            "inference": {"enforce_eager": True, **room, **inference},
        }
    )


def start(asked: Recipe, log: Path) -> Server:
    """The engine, on all GPUs but the trainer's."""
    command = engine_command(asked, "cuda" if GPUS else "cpu", "engine", sys.executable)
    argv = (*command.argv, "--skip-tokenizer-init")
    elsewhere = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(1, GPUS)))} if GPUS else {}
    env = {**command.env, **elsewhere, "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd()))}
    server = start_process(command._replace(argv=argv, env=env), {}, log)
    server.wait("/primeslurm/status", timeout_s=600)
    return server


async def updates(asked: Recipe, directory: Path, world: World, count: int) -> list[dict[str, float]]:
    """The parts of each update, in seconds. The first one connects."""
    parallel = asked.inference.parallel
    delivery, wanting = Delivery(workers=parallel.tp * (parallel.dp or 1), timeout_s=300), 0

    async def handle(request: Request) -> Answer:
        return await delivery.answer(request, lambda: wanting, 4)  # type: ignore[arg-type]

    address = f"tcp://127.0.0.1:{free_port()}"
    serving = asyncio.create_task(OrchestratorLink(address, handle).serve())
    policy = build(asked, world)
    sender = Sender(policy, published(asked, policy.stored_fp8), TrainerLink(address), world, 300)
    server = start(asked, directory / "engine.log")
    client = TimedClient(lambda: server.url, asked.model.path, delivery.place)
    rows = []
    try:
        for version in range(1, count + 1):
            wanting = 1
            delivery.expect(version)
            begun = time.monotonic()
            sending = asyncio.create_task(asyncio.to_thread(sender.serve, version))
            await client.apply(Policy(version, ""), 300)
            total, wanting = time.monotonic() - begun, 0
            await sending
            row = {"total": total, "sent": sender.seconds, "connecting": sender.connecting, **client.split()}
            rows.append({part: round(seconds, 3) for part, seconds in row.items()})
    finally:
        server.stop()
        serving.cancel()
    return rows


if __name__ == "__main__":
    main()
