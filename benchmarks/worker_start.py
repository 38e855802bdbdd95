"""Cost of starting a node's environment workers: each as a new process, and forked from one.

    python -m benchmarks worker_start --workers 16 --write

CPU seconds and memory (PSS, in which shared pages count proportionally) of real workers of `reverse-text`, until they
wait for rollouts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.support.machine import machine
from benchmarks.support.ports import free_port
from primeslurm.node.agent.child_process import Child, ProcessGroup
from primeslurm.node.agent.fork_client import ForkServer
from primeslurm.plan.commands.processes import environment_command
from primeslurm.recipe import Recipe
from scripts.models import tiny_model

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "worker_start.json"
# Workers that use no CPU for this long wait for rollouts [s].
STILL_S = 3.0


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks worker_start", description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(words)
    result: dict[str, Any] = {
        "command": f"python -m benchmarks worker_start --workers {options.workers} --write",
        "machine": machine(),
        "workers": options.workers,
    }
    for forked in (True, False):
        with TemporaryDirectory() as directory:
            found = measure(Path(directory), options.workers, forked)
        result["forked" if forked else "by themselves"] = found
    print(json.dumps(result, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def measure(directory: Path, workers: int, forked: bool) -> dict[str, float]:
    """Start workers, and return their cost once all are idle."""
    attempt = directory / "run" / "attempts" / "1"
    attempt.mkdir(parents=True)
    tiny_model.write_model(directory / "model")
    recipe = Recipe.model_validate(
        {
            "name": "workers",
            "seq_len": 512,
            "model": {"path": str(directory / "model")},
            "environments": [{"id": "reverse-text"}],
        }
    )
    (directory / "recipe.json").write_text(recipe.model_dump_json(by_alias=True))
    command = environment_command("reverse-text", 0)
    values = {
        "${python}": sys.executable,
        "${run_dir}/recipe.resolved.json": str(directory / "recipe.json"),
        "tcp://${addr:orchestrator:envs}": f"tcp://127.0.0.1:{free_port()}",
        "${attempt_dir}": str(attempt),
        "${node}": "0",
    }
    argv = [values.get(word, word) for word in command.argv]
    place = argv.index("--worker") + 1
    commands = [[*argv[:place], str(number), *argv[place + 1 :]] for number in range(workers)]
    began = time.monotonic()
    server, started = start(commands, command.imports if forked else (), directory)
    try:
        found = psutil.Process(server.pid) if server else None
        processes = [*([found] if found else []), *(psutil.Process(child.pid) for child in started)]
        return until_still(processes, began)
    finally:
        for child in started:
            child.kill()
        if server:
            server.close()


def start(
    commands: Sequence[Sequence[str]], imports: Sequence[str], directory: Path
) -> tuple[ForkServer | None, list[ProcessGroup]]:
    """Start processes, forked if there are modules to import together."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory), "HF_HUB_OFFLINE": "1"}
    logs = [directory / f"{number}.log" for number in range(len(commands))]
    if not imports:
        return None, [Child(argv, env, log, directory) for argv, log in zip(commands, logs, strict=True)]
    server = ForkServer(imports, sys.executable, env, directory / "server.log", directory)
    while not server.imported:
        time.sleep(0.05)
    return server, [server.fork(argv, env, log, directory, {}) for argv, log in zip(commands, logs, strict=True)]


def until_still(processes: Sequence[psutil.Process], began: float) -> dict[str, float]:
    """Wait until the processes use no CPU."""
    before, since = -1.0, time.monotonic()
    while time.monotonic() - since < STILL_S:
        time.sleep(0.2)
        now = sum(sum(process.cpu_times()[:2]) for process in processes)
        if now - before > 0.02 * len(processes):
            before, since = now, time.monotonic()
    memory = sum(process.memory_full_info().pss for process in processes)
    return {"cpu_s": round(before, 1), "seconds": round(since - began, 1), "memory_gb": round(memory / 1e9, 2)}
