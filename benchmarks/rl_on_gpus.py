"""The whole RL loop on GPUs: mismatch of trainer and engines, and the seconds of a policy update, in a few cells.

Needs two GPUs, or three for cells with separate prefill and decode engines. A cell takes one to two minutes. Without
names, all cells run for which the GPUs suffice. `--gpus 0 1 1` lets prefill and decode share the second of two GPUs,
and `--gpus 0 0` lets trainer and engine share one; policies are then transferred as files. Each cell is a separate run
(`primeslurm submit --local`) from the same random Qwen3-MoE, whose sizes are multiples of an FP8 block. `bf16-mtp` has
a GLM-4.5 of these sizes, whose draft layer is trained with the policy: its acceptance rate should grow. With
`--at-once`, all cells run at the same time, and their seconds mean little. Results come from the records of the run,
also of one that `--cell-s` has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.support import shared_gpu
from benchmarks.support.draft_layers import write_checkpoint
from primeslurm.records.events.policy import EngineUpdated
from primeslurm.records.events.training import WeightsPublished
from primeslurm.records.record import Event
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events, rows

HERE = Path(__file__).resolve().parent
CONFIG: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.04,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
# GLM-4.5 with one draft layer
DRAFTING: dict[str, Any] = {
    "n_routed_experts": CONFIG["num_experts"],
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 1,
}
REPLAY = {"trainer.router_replay": "true"}
FP8 = {"trainer.fp8": "true", "inference.quantization": "fp8"}
# Compiling DeepGEMM's kernels for all possible sizes takes minutes. An engine alone on its GPU needs few. Prefill and
# decode engines that compile during requests stop answering, and count as down. CUTLASS compiles nothing.
NO_WARM_UP = {"inference.env.VLLM_DEEP_GEMM_WARMUP": "skip"}
CUTLASS = {"inference.env.VLLM_USE_DEEP_GEMM": '"0"'}
FP8_KV = {"inference.kv_cache_dtype": "fp8"}
COMPILED = {"trainer.compile": "true"}
MTP = {"trainer.draft_layer": "{lr: 1.0e-3}", "inference.speculative": "{method: mtp, num_tokens: 1}"}
# First updates, which connect and compile.
SKIPPED = 2


@dataclass(frozen=True)
class Cell:
    """One run."""

    recipe: str
    gpus: int
    settings: Mapping[str, str]
    drafting: bool = False
    """Whether the model has a draft layer."""


CELLS = {
    "bf16": Cell("rl_on_two_gpus.yaml", 2, {}),
    "bf16-replay": Cell("rl_on_two_gpus.yaml", 2, REPLAY),
    "fp8": Cell("rl_on_two_gpus.yaml", 2, FP8 | NO_WARM_UP),
    "fp8-replay": Cell("rl_on_two_gpus.yaml", 2, FP8 | NO_WARM_UP | REPLAY),
    "bf16-compiled": Cell("rl_on_two_gpus.yaml", 2, COMPILED),
    "fp8-compiled": Cell("rl_on_two_gpus.yaml", 2, FP8 | NO_WARM_UP | COMPILED),
    "bf16-disaggregated": Cell("rl_on_gpus.yaml", 3, {}),
    "bf16-disaggregated-replay": Cell("rl_on_gpus.yaml", 3, REPLAY),
    "bf16-mtp": Cell("rl_on_two_gpus.yaml", 2, MTP, drafting=True),
    "bf16-files": Cell("rl_on_two_gpus.yaml", 2, shared_gpu.FILES),
    "bf16-deltas": Cell("rl_on_two_gpus.yaml", 2, {**shared_gpu.FILES, "weights.deltas": "true"}),
    "bf16-fp8-kv": Cell("rl_on_two_gpus.yaml", 2, FP8_KV),
    "fp8-cutlass-replay": Cell("rl_on_two_gpus.yaml", 2, FP8 | CUTLASS | REPLAY),
    "fp8-disaggregated": Cell("rl_on_gpus.yaml", 3, FP8 | CUTLASS),
    "fp8-disaggregated-replay": Cell("rl_on_gpus.yaml", 3, FP8 | CUTLASS | REPLAY),
}


def make_model(directory: Path, drafting: bool) -> None:
    """Write a random model with the demo's tokenizer."""
    import torch
    from transformers import GenerationConfig, Glm4MoeConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from scripts.models import tiny_model

    if drafting:
        config = {**CONFIG, **DRAFTING}
        layers = config.pop("num_hidden_layers")
        write_checkpoint(directory, lambda count: Glm4MoeConfig(**config, num_hidden_layers=count), layers, "bfloat16")
    else:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(directory)
    tiny_model.tokenizer().save_pretrained(directory)
    GenerationConfig(eos_token_id=2, pad_token_id=0).save_pretrained(directory)


def run(name: str, cell: Cell, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a cell, on the given GPUs if any are given, and return its results."""
    gpus: list[int] = options.gpus
    run_name = f"{name}-{time.strftime('%H%M%S')}"
    shared = len(set(gpus)) < len(gpus)
    settings = {**cell.settings, **(shared_gpu.shared_settings() if shared else {}), "max_steps": str(options.steps)}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    env = dict(os.environ)
    if gpus:
        directory = model.parent / "shared-gpu" / run_name
        found = shared_gpu.shared_gpus(directory, Path("runs").resolve(), gpus[: cell.gpus])
        words += ["--site", str(found.site)]
        env |= found.env
    recipe = [
        "submit",
        str(HERE / cell.recipe),
        "--local",
        "--wait",
        "--name",
        run_name,
        "--set",
        f"model.path={model}",
    ]
    began = time.monotonic()
    directory, code = RunDirectory(Path("runs") / run_name), 1
    try:
        command = [sys.executable, "-m", "primeslurm", *recipe, *words]
        code = subprocess.call(command, env=env, timeout=options.cell_s)
    except subprocess.TimeoutExpired:
        code = 124
    finally:
        if code:
            subprocess.call([sys.executable, "-m", "primeslurm", "cancel", str(directory.path)])
    seconds = round(time.monotonic() - began)
    reported = report(rows(directory.path), events(directory))
    return {"exit_code": code, "settings": settings, "seconds": seconds, **reported}


def report(steps: Sequence[Mapping[str, Any]], happened: Sequence[Event]) -> dict[str, Any]:
    """Return medians over the steps and updates of a run.

    `publish` is the trainer's part of an update, and `transfer` the part of it that sends tensors. `load` (while they
    arrive) and `pause` are those of the slowest engine.
    """
    kl = [row["trainer/mismatch_kl"] for row in steps if "trainer/mismatch_kl" in row]
    slowest: dict[int, dict[str, float]] = {}
    for event in happened:
        if isinstance(event, EngineUpdated) and event.load_s is not None and event.pause_s is not None:
            seen = slowest.setdefault(event.version, {"load": 0.0, "pause": 0.0})
            seen["load"] = max(seen["load"], event.load_s)
            seen["pause"] = max(seen["pause"], event.pause_s)
    parts = {
        "publish": [row["trainer/seconds/publish"] for row in steps if "trainer/seconds/publish" in row],
        "transfer": [e.sent_s for e in happened if isinstance(e, WeightsPublished) and e.sent_s is not None],
        **{part: [found[part] for _, found in sorted(slowest.items())] for part in ("load", "pause")},
    }
    seconds = [row["throughput/step_seconds"] for row in steps]
    accepted = [value for row in steps for key, value in row.items() if key.endswith("/acceptance_rate")]
    return {
        "steps": len(steps),
        "mismatch_kl": {"median": _median(kl), "max": max(kl, default=None)},
        "update_seconds": {part: _median(values[SKIPPED:] or values) for part, values in parts.items()},
        "step_seconds": _median(seconds[SKIPPED:]),
        **({"acceptance_rates": accepted} if accepted else {}),
        "first_step_seconds": next(iter(seconds), None),
    }


def _median(values: Sequence[float]) -> float | None:
    return float(f"{statistics.median(values):.4g}") if values else None


def main(words: list[str]) -> None:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks rl_on_gpus", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--gpus", type=int, nargs="+", default=[], help="in this order, repeated if shared")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--at-once", action="store_true", help="run all cells at the same time")
    parser.add_argument("--cell-s", type=float, help="seconds after which a cell's run is cancelled")
    options = parser.parse_args(words)
    gpus = len(options.gpus) or torch.cuda.device_count()
    names = options.cells or [name for name, cell in CELLS.items() if cell.gpus <= gpus]
    shared = f", as {options.gpus}" if options.gpus else ""
    model = Path(".primeslurm/rl-on-gpus").resolve()
    models = {drafting: model.with_name(f"{model.name}{'-mtp' * drafting}") for drafting in (False, True)}
    for drafting in {CELLS[name].drafting for name in names}:
        make_model(models[drafting], drafting)
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks rl_on_gpus", *words]),
        "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, one host, local executor{shared}",
        "versions": {name: version(name) for name in ("torch", "torchtitan", "vllm")},
        "model": CONFIG,
        "bytes": sum(file.stat().st_size for file in model.glob("*.safetensors")),
        "cells": {},
    }
    with ThreadPoolExecutor(len(names) if options.at_once else 1) as pool:
        running = {pool.submit(run, name, CELLS[name], models[CELLS[name].drafting], options): name for name in names}
        for done in as_completed(running):
            name = running[done]
            result["cells"][name] = done.result()
            options.out.write_text(json.dumps(result, indent=2) + "\n")
            print(name, json.dumps(result["cells"][name]), flush=True)
