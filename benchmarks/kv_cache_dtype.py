"""Throughput of an engine with its KV cache in the model's dtype and in FP8, in the same memory.

    timeout 280 python -m benchmarks kv_cache_dtype OUT.json                       # one GPU, Qwen3-4B's shape
    python -m benchmarks kv_cache_dtype OUT.json --shape tiny --layers 2 --sequences 4 --prompt 64 --sampled 16 \
        --kv-gib 0.02 --dtypes auto                                                # CPUs

Weights are random. All sequences are asked for at once; the cache of the model's dtype holds about half of them. How
far an FP8 cache is from the trainer is the matter of `python -m benchmarks agreement`. OUT.DTYPE.log has the engine's
output.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kv_offload import Load, measure, token_bytes
from benchmarks.support.machine import machine, versions
from primeslurm.plan.commands.command import Device
from primeslurm.plan.gpus import GIB
from primeslurm.recipe import Recipe

CELL_S = 130.0


def recipe(model: Path, dtype: str, load: Load, kv_bytes: int, kv_dtype: str) -> Recipe:
    """Return the recipe of one engine."""
    inference = {
        "kv_cache_bytes": kv_bytes,
        "kv_cache_dtype": kv_dtype,
        "max_num_seqs": load.conversations,
        # Compilation would take most of a cell's time.
        "vllm_extra": {
            "load_format": "dummy",
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        },
    }
    sections = {
        "seq_len": load.longest,
        "model": {"path": str(model), "dtype": dtype},
        "environments": [{"id": "reverse-text"}],
    }
    return Recipe.model_validate({"name": "kv-cache-dtype", "max_steps": 1, "inference": inference, **sections})


def main(words: list[str]) -> None:
    import torch

    from benchmarks.training_models import SHAPES

    parser = argparse.ArgumentParser(prog="python -m benchmarks kv_cache_dtype", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["qwen3_30b_a3b", "qwen3_4b", "tiny"], default="qwen3_4b")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--sampled", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--kv-gib", type=float, default=24.0, help="of KV cache")
    parser.add_argument("--dtypes", nargs="+", default=["auto", "fp8"])
    options = parser.parse_args(words)
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, number_bytes = ("bfloat16", 2) if device == "cuda" else ("float32", 4)
    shape = SHAPES[options.shape]
    config = shape.build(options.layers, None, None)
    config.architectures = [shape.config.__name__.replace("Config", "ForCausalLM")]
    load = Load(options.sequences, options.sequences, options.prompt, 0, options.sampled, turns=1)
    kv_bytes = int(options.kv_gib * GIB)
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks kv_cache_dtype", *words]),
        "machine": machine(),
        "versions": versions("torch", "vllm"),
        "kv_gib": options.kv_gib,
        "tokens_that_fit_in_the_model_dtype": kv_bytes // token_bytes(config, number_bytes),
        "load": {**vars(load), "longest": load.longest},
        "cells": {},
    }
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        for kv_dtype in options.dtypes:
            run_recipe = recipe(Path(name), dtype, load, kv_bytes, kv_dtype)
            log = options.out.with_suffix(f".{kv_dtype}.log")
            result["cells"][kv_dtype] = measure(run_recipe, device, load, config.vocab_size, CELL_S, log)
            print(kv_dtype, json.dumps(result["cells"][kv_dtype]), flush=True)
            options.out.write_text(json.dumps(result, indent=2) + "\n")
