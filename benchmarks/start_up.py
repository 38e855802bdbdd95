"""CPU time of short commands compared with importing typer, pydantic, yaml and jinja2, which they need.

CPU seconds (user and system), not elapsed time. Commands take turns, so that other load affects all of them.

`--run DIRECTORY` prints instead what each process of a run did until the first trained step, from events and from logs
of engines. Of processes with numbers, those with number 0 stand for all.
"""

from __future__ import annotations

import argparse
import calendar
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from primeslurm.records.events import nodes, policy, processes, training
from primeslurm.records.record import Event
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.history import attempt_events

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "start_up.json"
ROUNDS = 15
RECIPE = ["recipes/glm5_pd.yaml", "--site", "sites/h200.yaml"]
BASE = [sys.executable, "-c", "import typer, pydantic, yaml, jinja2"]
COMMANDS = {"--help": ["--help"], "check": ["check", *RECIPE], "render": ["render", *RECIPE], "plan": ["plan", *RECIPE]}
GOALS = {"--help": 2.0, "check": 3.0, "render": 3.0}
ENGINES = ("engine-", "prefill-", "decode-")
# vLLM's messages, and the part of the start that each one ends
ENGINE_MESSAGES = {
    "Resolved architecture": "model class inspected",
    "Initializing a V1 LLM engine": "engine core imported",
    "Starting to load model": "GPU initialized",
    "Model loading took": "weights loaded",
    "torch.compile took": "compiled",
    "GPU KV cache size": "memory profiled",
    "Graph capturing finished": "CUDA graphs captured",
    "init engine": "engine core ready",
    "Starting vLLM server": "serving",
}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks start_up", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--run", type=Path, help="run directory whose start to print")
    parser.add_argument("--attempt", type=int, default=1, help="attempt of the run (default: the first)")
    options = parser.parse_args(words)
    if options.run is not None:
        print(table(marks(RunDirectory(options.run).attempt(options.attempt))))
        return
    write = options.write
    commands = {"base": BASE} | {name: [sys.executable, "-m", "primeslurm", *words] for name, words in COMMANDS.items()}
    for argv in commands.values():
        cpu_seconds(argv)  # warms the file cache
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, argv in commands.items():
            seconds[name].append(cpu_seconds(argv))
    result = {
        "command": "python -m benchmarks start_up --write",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "load_average": os.getloadavg()[0]},
        "python": platform.python_version(),
        "median_of": ROUNDS,
        "cpu_seconds": {name: round(statistics.median(taken), 3) for name, taken in seconds.items()},
        "ratio_to_base": {name: ratio(seconds[name], seconds["base"]) for name in COMMANDS},
        "goals": GOALS,
    }
    print(json.dumps(result, indent=2))
    if write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def cpu_seconds(argv: list[str]) -> float:
    """Return user and system time of a command and its children [s]."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ratio(taken: list[float], base: list[float]) -> float:
    """Return the median over the rounds."""
    return round(statistics.median(one / other for one, other in zip(taken, base, strict=True)), 2)


class Mark(NamedTuple):
    """The end of a part of the start."""

    time: float  # Unix seconds
    process: str
    text: str


def marks(attempt: Attempt) -> list[Mark]:
    """Return the marks of an attempt until its first trained step, in order of time."""
    result: list[Mark] = []
    for event in attempt_events(attempt):
        if (mark := _mark(event)) and not re.search("[1-9]", mark.process):
            result.append(mark)
            if isinstance(event, processes.ProcessStarted) and mark.process.startswith(ENGINES):
                result += engine_marks(attempt, mark)
        if isinstance(event, training.StepTrained):
            return sorted(mark for mark in result if mark.time <= event.time)
    return sorted(result)


def _mark(event: Event) -> Mark | None:
    process, text = event.process, ""
    match event:
        case nodes.AgentStarted():
            text = "agent runs"
        case nodes.PreflightDone(fitness=fitness):
            text = f"preflight and environment check: {fitness}"
        case nodes.NodesAssigned(process="head"):
            text = "nodes assigned"
        case nodes.AddressesPublished():
            text = "addresses published"
        case processes.ProcessStarted(name=name):
            process, text = name, "process started"
        case training.TrainerStarted():
            text = "imported"
        case training.CheckpointLoaded(step=step):
            text = f"weights of step {step} loaded"
        case training.WarmedUp():
            text = "compiled with a synthetic batch"
        case training.StepTrained(step=step):
            text = f"step {step} trained"
        case training.OrchestratorUp():
            text = "orchestrator runs"
        case training.BatchFormed(step=step):
            text = f"batch of step {step} formed"
        case policy.EngineStateChanged(engine=engine, state=state):
            process, text = engine, state
    return Mark(event.time, process, text) if text else None


def engine_marks(attempt: Attempt, started: Mark) -> Iterator[Mark]:
    """Read marks from the log of an engine. Its times have whole seconds, without year and time zone."""
    year = time.gmtime(started.time).tm_year
    for path in (attempt.path / "logs").rglob(f"{started.process}.log"):
        zone = None
        for line in path.read_text(errors="replace").splitlines():
            if not (match := re.search(r"\b[A-Z]+ (\d\d-\d\d \d\d:\d\d:\d\d) \[\S+\] (.*)", line)):
                continue
            local = calendar.timegm(time.strptime(f"{year}-{match[1]}", "%Y-%m-%d %H:%M:%S"))
            if zone is None:
                # Zones differ by quarters of an hour, and the first message follows the start of the process.
                zone = round((local - started.time) / 900) * 900
                yield Mark(float(local - zone), started.process, "API server imported")
            if text := next((text for words, text in ENGINE_MESSAGES.items() if words in match[2]), ""):
                yield Mark(float(local - zone), started.process, text)


def table(of: list[Mark]) -> str:
    """Return a Markdown table: time since the first mark, and since the mark before of the same process [s]."""
    lines = ["| s | process | end of a part | s since its mark before |", "| --- | --- | --- | --- |"]
    before: dict[str, float] = {}
    for at, process, text in of:
        begin = of[0].time
        lines.append(f"| {at - begin:.1f} | {process} | {text} | {at - before.get(process, begin):.1f} |")
        before[process] = at
    return "\n".join(lines)
