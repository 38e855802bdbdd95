"""Demo runs on real GPUs, without Slurm: warm starts, then RL with trainer, prefill and decode engines on GPUs.

    timeout 880 python -m benchmarks gpu_run OUT.json tool-use-fp8          # four GPUs
    timeout 880 python -m benchmarks gpu_run OUT.json tool-use-fp8-replay   # four GPUs; two engines
    timeout 270 python -m benchmarks gpu_run OUT.json tool-use-sft          # one GPU: the warm start of both
    timeout 880 python -m benchmarks gpu_run OUT.json tool-use-fp8 --gpus 0 1 0 1   # two GPUs, shared
    timeout 880 python -m benchmarks gpu_run OUT.json tool-use-fp8 --gpus 0 0 0 0   # one GPU, shared by all

Each cell is a separate run (local executor) with its own time limit. A cell that starts from another cell's policy
takes it from .primeslurm/gpu-run, or runs that cell first. Results come from the records of the run, which
OUT.CELL.tar.gz keeps. Without names, all cells run for which the GPUs suffice. If GPUs are shared and NCCL is older
than 2.30, policies are transferred as files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.rl_on_gpus import report
from benchmarks.support.machine import machine, versions
from benchmarks.support.shared_gpu import SharedGpus, shared_gpus, shared_settings
from primeslurm.records.metrics import Row
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events, rows
from primeslurm.run.status.summary import summarise

RECIPES = Path("recipes")
RUNS = Path("runs")
MODELS = Path(".primeslurm/gpu-run").resolve()


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        recipe: its file in recipes/.
        gpus: number of GPUs.
        timeout_s: time limit [s].
        settings: recipe fields by dotted path.
        after: cell from whose newest policy it starts.
        tiny: arguments of `scripts.models.tiny_model model`, for a start from a random model.
        demonstrations: module, with arguments, that writes the demonstrations of a warm start.
    """

    recipe: str
    gpus: int
    timeout_s: int
    settings: Mapping[str, str]
    after: str = ""
    tiny: tuple[str, ...] = ()
    demonstrations: tuple[str, ...] = field(default=())


BF16 = {"model.dtype": "bfloat16"}
SMALL = BF16 | {"deployment.train.gpus_per_node": "2", "inference.gpu_memory_utilization": "0.3"}
FP8 = {
    "trainer.fp8": "true",
    "inference.quantization": "fp8",
    "inference.deep_gemm": "true",
    # Compiling DeepGEMM's kernels for all possible sizes takes minutes. This run needs few.
    "inference.env.VLLM_DEEP_GEMM_WARMUP": "skip",
    "weights.transport": "nccl",
    "max_steps": "30",
    "trainer.optimizer.lr": "1.0e-4",
}
P_AND_D = {"deployment.inference": "{type: disaggregated, prefill: {gpus_per_node: 1}, decode: {gpus_per_node: 1}}"}
REPLAY = {
    "deployment.inference": "{type: multi_node, gpus_per_node: 2}",  # two engines
    "trainer.router_replay": "true",
}
# the demo's own tasks, because borrowed machines may lack bubblewrap
TRUSTED = {"environments.0.runtime": "{type: subprocess, trusted: true}"}
# For experts wider than 512, vLLM uses DeepGEMM in blocks of 128. For narrower ones, 0.32 reserves memory as for
# DeepGEMM
# but uses Triton, which needs more unless the model is twice as wide: the assertion in _resize_cache fails.
FP8_SIZES = ("--hidden", "640", "--head-dim", "128")
# The recipe's schedule is tuned for the demo's narrow model on a CPU. This one was tuned for the wide model.
WIDE_WARM_START = {
    "max_steps": "400",
    "seq_len": "512",
    "sft.batch_size": "48",
    "trainer.optimizer.type": "adamw",
    "trainer.optimizer.lr": "1.0e-3",
    "trainer.optimizer.min_lr_ratio": "0.0",
    "checkpoint.interval": "400",
}
TINY = "scripts.models.tiny_model"
TOOL_USE = "scripts.models.tool_use_demonstrations"
CELLS = {
    "reverse-text-sft": Cell(
        "reverse_text_sft.yaml", 1, 220, BF16, tiny=("model",), demonstrations=(TINY, "demonstrations")
    ),
    "reverse-text": Cell(
        "reverse_text.yaml", 4, 420, SMALL | {"inference.enforce_eager": "true"}, after="reverse-text-sft"
    ),
    "tool-use-sft": Cell(
        "tool_use_sft.yaml",
        1,
        220,
        BF16 | WIDE_WARM_START,
        tiny=("model", *FP8_SIZES, "--phrases"),
        demonstrations=(TOOL_USE,),
    ),
    "tool-use-fp8": Cell("tool_use.yaml", 4, 650, SMALL | FP8 | P_AND_D | TRUSTED, after="tool-use-sft"),
    "tool-use-fp8-replay": Cell("tool_use.yaml", 4, 650, SMALL | FP8 | REPLAY | TRUSTED, after="tool-use-sft"),
}


def run(name: str, cell: Cell, more: Sequence[str], archive: Path, shared: SharedGpus | None) -> dict[str, Any]:
    """Run a cell, and return its results.

    Args:
        archive: path of the archived records, without `.tar.gz`.
        shared: how processes share this machine's GPUs; None if each has its own.
    """
    run_name = f"{name}-{time.strftime('%H%M%S')}"
    changes = {**cell.settings, **start(name, cell), **(shared_settings() if shared else {})}
    settings = [*(f"{key}={value}" for key, value in changes.items()), *more]
    words = [word for setting in settings for word in ("--set", setting)]
    local = ["submit", str(RECIPES / cell.recipe), "--local", "--name", run_name, "--wait"]
    if shared:
        local += ["--site", str(shared.site)]
    command = ("-m", "primeslurm", *local, "--set", "slurm.max_attempts=1", *words)
    began = time.monotonic()
    directory, code = RunDirectory(RUNS / run_name), 1
    try:
        code = python(*command, timeout_s=cell.timeout_s, env=shared.env if shared else {})
    finally:
        if code:
            python("-m", "primeslurm", "cancel", str(directory.path))
        if (directory.path / "attempts").is_dir():  # also if `timeout` ends this benchmark
            shutil.make_archive(str(archive), "gztar", directory.path, "attempts")
    seconds = round(time.monotonic() - began)
    published = sorted((directory.path / "weights").glob("v*"))
    if published and not cell.after:
        shutil.copytree(published[-1], MODELS / name / "model", dirs_exist_ok=True)
    steps = rows(directory.path)
    found = {"exit_code": code, "settings": settings, "seconds": seconds}
    if not steps:
        return found
    found |= {"summary": msgspec.to_builtins(summarise(directory))}
    return found | (of_rl(steps, directory) if cell.after else {})


def start(name: str, cell: Cell) -> dict[str, str]:
    """Make the start of a cell if it does not exist, and return the settings that use it."""
    if cell.after:
        return {"model.path": str(MODELS / cell.after / "model")}
    random, chats = MODELS / name / "random", MODELS / name / "demonstrations.jsonl"
    make, *words = cell.tiny
    python("-W", "ignore", "-m", TINY, make, str(random), *words)
    python("-W", "ignore", "-m", *cell.demonstrations, str(chats))
    return {"model.path": str(random), "sft.data.path": str(chats)}


def of_rl(steps: Sequence[Row], directory: RunDirectory) -> dict[str, Any]:
    """Return update and pause seconds, mismatch, tokens per second and idle shares of a run."""
    names = {"sampled": "throughput/tokens_per_s", "trained": "trainer/tokens_per_s"}
    return {
        **report(steps, events(directory)),
        "tokens_per_s": {
            kind: round(statistics.median(row[name] for row in steps if name in row), 1) for kind, name in names.items()
        },
        "idle": idle(steps[1:]),  # the first step waits for engines to start
    }


def idle(steps: Sequence[Row]) -> dict[str, float]:
    """Return the share of time in which trainer and engines had nothing to do, by role.

    The trainer's phase `wait` is the wait for a batch. Engines are polled every few seconds.
    """
    phases = [(name, row[name]) for row in steps for name in row if name.startswith("trainer/seconds/")]
    total = sum(seconds for _, seconds in phases)
    waited = sum(seconds for name, seconds in phases if name == "trainer/seconds/wait")
    shares = {"trainer": waited / total} if total else {}
    busy: dict[str, list[float]] = {}
    for row in steps:
        for name, value in row.items():
            if name.startswith("engines/") and name.endswith("/busy_mean"):
                busy.setdefault(name.split("/")[1], []).append(value)
    shares |= {role: 1 - statistics.fmean(values) for role, values in busy.items()}
    return {role: round(share, 3) for role, share in shares.items()}


def python(*words: str, timeout_s: float = 600, env: Mapping[str, str] = {}) -> int:
    """Run Python, and return its exit code. After the time limit it gets SIGTERM, and counts as failed."""
    process = subprocess.Popen([sys.executable, *words], env={**os.environ, **env})
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        process.terminate()  # no effect on a process that has ended
        process.wait()


def in_order(names: Sequence[str]) -> list[str]:
    """Return cells in the order of running, with missing prerequisites."""
    found: list[str] = []
    for name in names:
        before = CELLS[name].after
        if before and before not in found and not (MODELS / before / "model").is_dir():
            found.append(before)
        if name not in found:
            found.append(name)
    return found


def main(words: list[str]) -> None:
    """Run the cells, and write all results so far after each. Return the exit code of the first failed cell."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_run", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the cells' recipes")
    parser.add_argument(
        "--gpus", nargs="+", type=int, metavar="GPU", help="of this machine, in the order in which processes get them"
    )
    options = parser.parse_args(words)
    if unknown := set(options.cells) - CELLS.keys():
        parser.error(f"no cell is named {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    count = len(options.gpus) if options.gpus else torch.cuda.device_count()
    fitting = [name for name, cell in CELLS.items() if cell.gpus <= count]
    shared = shared_gpus(MODELS / "shared-gpus", RUNS.resolve(), options.gpus) if options.gpus else None
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks gpu_run", *words]),
        "machine": f"{machine()}, local executor{', GPUs ' + str(options.gpus) if shared else ''}",
        "versions": versions("torch", "torchtitan", "vllm"),
        "cells": {},
    }
    for name in in_order(options.cells or fitting):
        # Settings apply to the named cells, not to their prerequisites.
        more = options.set if name in (options.cells or fitting) else []
        found = run(name, CELLS[name], more, options.out.with_suffix(f".{name}"), shared)
        result["cells"][name] = found
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        print(name, json.dumps(found), flush=True)
        if found["exit_code"]:
            sys.exit(found["exit_code"])
