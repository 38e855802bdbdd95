"""Time until a run has recovered from a killed engine (of two replicas), and from a killed trainer rank.

    timeout 600 python -m benchmarks recovery OUT.json 2      # GPUs of the trainer; each replica has one more
    timeout 600 python -m benchmarks recovery OUT.json 2 --gpus 0 1 0 1      # two GPUs, shared
    scripts/warm_start.sh .primeslurm/reverse-text
    python -m benchmarks recovery OUT.json 1 --model .primeslurm/reverse-text/model --patience-s 1200

One run (local executor) with the model of `rl_on_gpus`, or another. After some committed steps, the engine of the
second replica gets SIGKILL. Once it serves again and steps continue, the trainer's last rank does. All results are
seconds since the signal, from events of the run, which is cancelled at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.rl_on_gpus import HERE, make_model
from benchmarks.support.machine import machine, versions
from benchmarks.support.shared_gpu import shared_gpus, shared_settings
from primeslurm.api.recipes.loading import load
from primeslurm.api.runs.run import Run
from primeslurm.records.events.nodes import AgentStarted, AttemptEnds
from primeslurm.records.events.policy import EngineUpdated
from primeslurm.records.events.processes import ProcessExited, ProcessStarted
from primeslurm.records.events.training import CheckpointLoaded, StepTrained
from primeslurm.records.record import Event
from primeslurm.run.history import events

R = TypeVar("R")
# Steps to train before the first fault, and between the two.
STEPS = 4


def engine_recovery(happened: Sequence[Event], engine: str, killed: float) -> dict[str, Any] | None:
    """Return how a run recovered from a killed engine.

    Args:
        killed: time of the signal [Unix seconds].

    Returns:
        Seconds until its end was noticed, it was restarted, and it served the current policy again; steps trained until
    then, the longest time without a step, and the median before. None if it does not serve yet.
    """
    later = [event for event in happened if event.time >= killed]
    started = _first(e for e in later if isinstance(e, ProcessStarted) and e.name == engine)
    if started is None:
        return None
    served = _first(e for e in later if isinstance(e, EngineUpdated) and e.engine == engine and e.time >= started)
    if served is None:
        return None
    steps = [event.time for event in _steps(happened) if event.time <= served]
    before, meanwhile = [at for at in steps if at < killed], [at for at in steps if at >= killed]
    gaps = _gaps([*before[-1:], *meanwhile, served])
    seconds = {
        "exit_seen": _first(e for e in later if isinstance(e, ProcessExited) and e.name == engine),
        "started": started,
        "serves": served,
    }
    return {
        **_since(killed, seconds),
        "steps_meanwhile": len(meanwhile),
        "longest_without_step": round(max(gaps), 2) if gaps else None,
        "step_before": _median(_gaps(before)),
    }


def trainer_recovery(happened: Sequence[Event], rank: str, killed: float) -> dict[str, Any] | None:
    """Return how a run recovered from a killed trainer rank, through another attempt.

    Args:
        killed: time of the signal [Unix seconds].

    Returns:
        Seconds until its end was noticed, the attempt ended, the next one had an agent, all ranks had read the
    checkpoint, all engines served, a step was trained, and a new step was trained; the number of repeated steps. None
    if that has not all happened yet.
    """
    later = [event for event in happened if event.time >= killed]
    ended = _first(e for e in later if isinstance(e, AttemptEnds))
    again = [event for event in later if ended is not None and event.time > ended]
    loaded = [event for event in again if isinstance(event, CheckpointLoaded)]
    steps = _steps(again)
    last = max((event.step for event in _steps(happened) if ended is not None and event.time <= ended), default=0)
    caught_up = _first(event for event in steps if event.step > last)
    engines = {event.engine for event in happened if isinstance(event, EngineUpdated)}
    serving = {event.engine: event.time for event in reversed(again) if isinstance(event, EngineUpdated)}
    if ended is None or caught_up is None or serving.keys() < engines:
        return None
    seconds = {
        "exit_seen": _first(e for e in later if isinstance(e, ProcessExited) and e.name == rank),
        "attempt_ends": ended,
        "next_agent": _first(e for e in again if isinstance(e, AgentStarted)),
        "checkpoint_loaded": max((event.time for event in loaded if event.time <= caught_up), default=None),
        "engines_serve": max(serving.values()),
        "first_step": _first(steps),
        "first_new_step": caught_up,
    }
    return {**_since(killed, seconds), "steps_repeated": last - min((e.step for e in loaded), default=last)}


def _steps(happened: Iterable[Event]) -> list[StepTrained]:
    return [event for event in happened if isinstance(event, StepTrained)]


def _first(happened: Iterable[Event]) -> float | None:
    return next((event.time for event in happened), None)


def _since(killed: float, times: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if at is None else round(at - killed, 2) for name, at in times.items()}


def _gaps(times: Sequence[float]) -> list[float]:
    return [late - early for early, late in itertools.pairwise(times)]


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


class Faults:
    """Kills processes of a run with two replicas. `patience_s` is the time limit for each state to come."""

    def __init__(self, run: Run, patience_s: float) -> None:
        self._run, self._patience_s = run, patience_s

    def kill_engine(self) -> dict[str, Any]:
        """Kill the second replica's engine, and return the result. Raise TimeoutError or RuntimeError (run ended)."""
        self._after_steps(STEPS)
        engine, killed = self._kill("engine-r1-0")
        return self._until(lambda: engine_recovery(events(self._run.directory), engine, killed))

    def kill_trainer(self) -> dict[str, Any]:
        """Kill the trainer's last rank, and return the result. Raise as `kill_engine`."""
        self._after_steps(STEPS)
        ranks = [p.name for p in self._run.status(processes=True).processes if p.name.startswith("trainer-rank-")]
        rank, killed = self._kill(max(ranks, key=lambda name: int(name.rpartition("-")[2])))
        return self._until(lambda: trainer_recovery(events(self._run.directory), rank, killed))

    def _kill(self, name: str) -> tuple[str, float]:
        found = next(p for p in self._run.status(processes=True).processes if p.name == name)
        assert found.pid is not None
        os.kill(found.pid, signal.SIGKILL)
        return name, time.time()

    def _after_steps(self, count: int) -> None:
        begun = self._run.status().step or 0

        def trained() -> bool:
            status = self._run.status()
            return (status.step or 0) >= begun + count and (status.committed_step or 0) > 0

        self._until(trained)

    def _until(self, ask: Callable[[], R | None]) -> R:
        deadline = time.monotonic() + self._patience_s
        while not (answer := ask()):
            status = self._run.status()
            if not status.active:
                raise RuntimeError(f"the run is {status.phase}: {status.reason}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not within {self._patience_s:.0f} s; the run is {status.phase}, step {status.step}"
                )
            time.sleep(0.5)
        return answer


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks recovery", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("trainer_gpus", type=int)
    parser.add_argument("--model", type=Path, help="its directory; default: that of rl_on_gpus, made on the spot")
    parser.add_argument("--patience-s", type=float, default=140.0, help="for each state that is waited for")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the recipe")
    parser.add_argument(
        "--gpus", nargs="+", type=int, metavar="GPU", help="of this machine, in the order in which processes get them"
    )
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    options = arguments(words)
    model = options.model or Path(".primeslurm/rl-on-gpus")
    if options.model is None:
        make_model(model)
    settings = {
        "model.path": str(model.resolve()),
        "deployment.train.gpus_per_node": str(options.trainer_gpus),
    }
    site = None
    if options.gpus:
        settings |= shared_settings()
        shared = shared_gpus(Path(".primeslurm/shared-gpus").resolve(), Path("runs").resolve(), options.gpus)
        os.environ |= shared.env
        site = shared.site
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *options.set]
    name = f"recovery-{time.strftime('%H%M%S')}"
    loaded = load(HERE / "recovery.yaml", site=site, local=True, overrides=overrides, name=name)
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks recovery", *words]),
        "machine": f"{machine()}, local executor{', GPUs ' + str(options.gpus) if options.gpus else ''}",
        "versions": versions("torch", "vllm"),
        "seconds_since_the_signal": {},
    }
    run = loaded.submit()
    faults = Faults(run, options.patience_s)
    try:
        for name, fault in {"engine": faults.kill_engine, "trainer": faults.kill_trainer}.items():
            try:
                found = fault()
            except (RuntimeError, TimeoutError) as error:
                found = {"failed": str(error)}
            result["seconds_since_the_signal"][name] = found
            print(name, json.dumps(found), flush=True)
            options.out.write_text(json.dumps(result, indent=2) + "\n")
            if "failed" in found:
                break
    finally:
        run.cancel()
