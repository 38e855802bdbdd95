"""The memory model compared with one GPU (under 5 minutes, no network).

vLLM loads a random Qwen3-shaped model of 4 billion parameters, and reports the size of its weights and KV cache. Then
the trainer runs a few steps, and torch reports its peak memory. Each part is a separate process, because neither frees
its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from primeslurm.models.catalog import catalog
from primeslurm.models.hf_config import shape_of
from primeslurm.plan.estimates.engine_memory import EngineLayout, engine_memory
from primeslurm.plan.estimates.trainer_memory import TrainerLayout, trainer_memory
from primeslurm.plan.gpus import GIB

RESULT = Path(__file__).resolve().parent / "results" / "gpu_memory.json"
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
UTILIZATION = 0.9
SEQ_LEN = 8192
BATCHED_TOKENS = 8192


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_memory", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--part", choices=["model", "engine", "trainer"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.part:
        print("RESULT " + json.dumps(PARTS[options.part](options.directory)))
        return
    assert shape_of(CONFIG) == catalog()["Qwen/Qwen3-4B"].shape
    with tempfile.TemporaryDirectory() as directory:
        made = in_process("model", directory)
        result = {
            "command": "python -m benchmarks gpu_memory --write",
            **made,
            "engine": compare(in_process("engine", directory), predicted_engine(made["gpu_gib"])),
            "trainer": compare(in_process("trainer", directory), predicted_trainer()),
        }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.write:
        RESULT.write_text(text)


def in_process(part: str, directory: str) -> dict[str, Any]:
    """Run one part as a process, and parse its result line."""
    argv = [sys.executable, "-m", "benchmarks", "gpu_memory", "--part", part, "--directory", directory]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(json.loads(line.removeprefix("RESULT ")))


def compare(measured: dict[str, float], predicted: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return both values, and the error [%]."""
    return {
        name: {
            "measured": round(value, 2),
            "predicted": round(predicted[name], 2),
            "error_percent": round(100 * (predicted[name] / value - 1), 1),
        }
        for name, value in measured.items()
    }


def predicted_engine(gpu_gib: float) -> dict[str, float]:
    """Return the memory model's prediction for an engine that has the GPU to itself."""
    layout = EngineLayout(1, 1, 2, 2, False, BATCHED_TOKENS, True, None)
    memory = engine_memory(shape_of(CONFIG), layout, gpu_gib * GIB, UTILIZATION)
    return {"weights_gib": memory.weights / GIB, "kv_tokens": memory.kv_tokens}


def predicted_trainer() -> dict[str, float]:
    """Return the memory model's prediction for a trainer on one GPU."""
    memory = trainer_memory(shape_of(CONFIG), TrainerLayout(1, 1, SEQ_LEN, "full"))
    return {"peak_gib": memory.allocated / GIB}


def make_model(directory: Path) -> dict[str, Any]:
    """Write random weights and a config, without a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**CONFIG)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    properties = torch.cuda.get_device_properties(0)
    return {"gpu": properties.name, "gpu_gib": round(properties.total_memory / GIB, 1)}


def measure_engine(directory: Path) -> dict[str, float]:
    """Return the size of vLLM's weights, and the tokens in its KV cache."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    engine = LLM(
        str(directory),
        skip_tokenizer_init=True,
        gpu_memory_utilization=UTILIZATION,
        max_model_len=SEQ_LEN,
        max_num_batched_tokens=BATCHED_TOKENS,
    )
    config = engine.llm_engine.vllm_config.cache_config
    (weights,) = engine.collective_rpc(lambda worker: worker.model_runner.model_memory_usage)
    return {"weights_gib": weights / GIB, "kv_tokens": config.num_gpu_blocks * config.block_size}


def measure_trainer(directory: Path) -> dict[str, float]:
    """Return the peak memory of three trainer steps with AdamW and full recomputation."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    os.environ |= alone
    import torch

    from primeslurm.recipe import Recipe
    from primeslurm.trainer.assembly.build import build
    from primeslurm.trainer.base.interrupt import Interrupt
    from primeslurm.trainer.distributed.world import join

    parallelism = {"activation_checkpointing": "full"}
    recipe = Recipe.model_validate(
        {
            "schema": 1,
            "name": "gpu-memory",
            "seq_len": SEQ_LEN,
            "model": {"path": str(directory)},
            "trainer": {"parallelism": parallelism},
        }
    )
    policy = build(recipe, join(Interrupt(), 600))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-6)
    tokens = torch.randint(0, CONFIG["vocab_size"], (1, SEQ_LEN), device="cuda")
    positions = torch.arange(SEQ_LEN, device="cuda")[None]
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        (logits,) = policy.logits(tokens, positions)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB}


PARTS = {"model": make_model, "engine": measure_engine, "trainer": measure_trainer}
