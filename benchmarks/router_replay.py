"""Effect of router replay on the mismatch between trainer and engine.

A vLLM engine in bfloat16 samples one batch from a random Qwen3-MoE (8 layers, 32 experts, 4 per token), and reports the
routed experts. The rollouts are packed as in a run. The trainer, with the same weights, computes the log-probabilities
of the same tokens in bfloat16 and float32, with its own experts and with the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.support.ports import free_port
from benchmarks.support.servers import rank_environment, start_process
from primeslurm.orchestrator.batching.packing import Common, Document, RowLengths, encode, pack
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import Completion, GenerateEndpoint
from primeslurm.plan.commands.command import Device
from primeslurm.plan.commands.engine import ALONE, Engines
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.batch import Batch, BatchInfo, Row, stack
from primeslurm.wire.batches.frames import assembled

RESULT = Path(__file__).resolve().parent / "results" / "router_replay.json"
SEQ_LEN = 256
PROMPT, ANSWER, ROLLOUTS = 32, 224, 64
CONFIG = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks router_replay", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        make_model(directory)
        rows = sample(directory, options.device)
        result = {
            "command": f"python -m benchmarks router_replay --device {options.device} --write",
            "machine": f"{os.cpu_count()} x {platform.machine()}",
            "vllm": version("vllm"),
            "torch": version("torch"),
            "model": CONFIG,
            "engine_dtype": "bfloat16",
            "trained_tokens": int(sum(row.mask.sum() for row in rows)),
            "routed_bytes_per_token": CONFIG["num_hidden_layers"] * CONFIG["num_experts_per_tok"],  # type: ignore[operator]
            "trainer": {dtype: compare(directory, dtype, rows) for dtype in ("bfloat16", "float32")},
        }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.write:
        RESULT.write_text(text)


def recipe(directory: Path, dtype: str) -> Recipe:
    """Return the recipe of a run with router replay."""
    return Recipe.model_validate(
        {
            "name": "router-replay",
            "max_steps": 1,
            "seq_len": SEQ_LEN,
            "model": {"path": str(directory), "dtype": dtype},
            "trainer": {"router_replay": True},
            "environments": [{"id": "reverse-text"}],
            "inference": {"kv_cache_bytes": 128 * 2**20},
        }
    )


def make_model(directory: Path) -> None:
    """Write random weights, a config and the demo's tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from scripts.models import tiny_model

    torch.manual_seed(0)
    # bfloat16 values, so that trainer and engine start with equal weights in any dtype
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).bfloat16().save_pretrained(directory)
    tiny_model.tokenizer().save_pretrained(directory)


def sample(directory: Path, device: str) -> list[Row]:
    """Return packed rows of one on-policy batch."""
    engines = Engines(recipe(directory, "bfloat16"), cast(Device, device), "engine", sys.executable)
    engine = start_process(engines.command(ALONE), {}, directory / "engine.log")
    try:
        engine.wait("/primeslurm/status")
        documents = asyncio.run(rollouts(engine.url, directory))
    finally:
        engine.stop()
    (packed,) = pack(documents, RowLengths(SEQ_LEN, None), ranks=1)
    return Batch.decode(assembled(encode(packed, BatchInfo(1, 0, 1, 0), Common.of(documents, 1.0)))).rows


async def rollouts(url: str, directory: Path) -> list[Document]:
    """Return the engine's completions of random prompts."""
    client = EngineClient(lambda: url, str(directory))
    await client.apply(PolicyVersion(0, str(directory)), timeout_s=120)
    endpoint = GenerateEndpoint(lambda: url, SEQ_LEN, timeout_s=600, routed=True)
    sampling = {"max_tokens": ANSWER, "temperature": 1.0, "ignore_eos": True}
    prompts = np.random.default_rng(0).integers(3, 512, (ROLLOUTS, PROMPT)).tolist()
    requests = (endpoint.generate({"token_ids": p, "sampling_params": sampling}, {}) for p in prompts)
    answers = await asyncio.gather(*requests)
    await endpoint.close()
    return [document(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def document(prompt: list[int], answer: Completion) -> Document:
    """Return one rollout for training."""
    given = [0.0] * len(prompt)
    tokens = np.array([*prompt, *answer.token_ids], np.int32)
    logprobs = np.array([*given, *answer.logprobs], np.float32)
    return Document(
        tokens,
        np.arange(len(tokens)) >= len(prompt),
        logprobs,
        np.zeros(len(tokens), np.float32),
        True,
        routed_experts=answer.routed_experts,
    )


def compare(directory: Path, dtype: str, rows: list[Row]) -> dict[str, Any]:
    """Return the mismatch with the trainer's own experts, and with the engine's."""
    alone = rank_environment(0, 1, free_port())
    os.environ |= {name: value for name, value in alone.items() if name != "OMP_NUM_THREADS"}
    import torch

    from primeslurm.trainer.assembly.build import build
    from primeslurm.trainer.base.interrupt import Interrupt
    from primeslurm.trainer.components.router_replay import ReplayRouter
    from primeslurm.trainer.distributed.world import join

    world = join(Interrupt(), timeout_s=60)
    policy = build(recipe(directory, dtype), world)
    arrays = {name: torch.from_numpy(array).to(world.device) for name, array in stack(rows).items()}
    routed = arrays["routed_experts"]
    known = (routed != 255).all(-1)
    differ: list[torch.Tensor] = []
    for module in policy.model.modules():
        if isinstance(module, ReplayRouter):
            module.register_forward_hook(lambda router, _, out: differ.append(choices_differ(router, out[1])))

    def choices_differ(router: ReplayRouter, chosen: torch.Tensor) -> torch.Tensor:
        engine = routed[:, :, router.layer].long().sort(-1).values
        return (chosen.sort(-1).values != engine).any(-1)[known[:, :, router.layer]]

    result: dict[str, Any] = {}
    for name, replayed in (("own_choice", None), ("replayed", routed)):
        differ.clear()
        began = time.perf_counter()
        with torch.no_grad():
            tokens = arrays["token_ids"].long()
            logits = policy.logits(tokens, arrays["positions"].long(), routed=replayed)[0]
        mine = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        trained = arrays["mask"][:, 1:]
        difference = (mine - arrays["logprobs"][:, 1:])[trained]
        result[name] = {
            "mismatch_kl": (difference.expm1() - difference).mean().item(),
            "mean_absolute_difference": difference.abs().mean().item(),
            "largest_difference": difference.abs().max().item(),
            "choices_that_differ": torch.cat(differ).float().mean().item(),
            "seconds": round(time.perf_counter() - began, 2),
        }
    result["ratio"] = round(result["own_choice"]["mismatch_kl"] / result["replayed"]["mismatch_kl"], 1)
    world.close()
    return result
