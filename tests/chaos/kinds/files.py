"""Faults of the file system with the run directory, and of files in it."""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from primeslurm.run.status.run_status import RunStatus
from primeslurm.wire.stored import checkpoints
from tests.chaos.faulty_deployment import FaultyDeployment
from tests.chaos.kinds.fault_effect import GOAL_S, FaultEffect, Kind, NoTargetError, goal_of, one_of

SECONDS = (3.0, 15.0)
LONG_S = (45.0, 60.0)
"""Longer than the timeout of an unresponsive head [s]."""


def _fill(deployment: FaultyDeployment, rng: Random, *, long: bool = False) -> FaultEffect:
    seconds, filler = round(rng.uniform(*(LONG_S if long else SECONDS)), 1), deployment.runs / "filler"
    if filler.exists():
        raise NoTargetError
    try:
        with filler.open("wb", buffering=0) as handle:
            while True:
                handle.write(b"x" * 65536)
    except OSError as error:
        if error.errno == errno.EROFS:
            raise NoTargetError from error
        if error.errno != errno.ENOSPC:
            raise
    free = partial(filler.unlink, missing_ok=True)
    return FaultEffect(f"for {seconds} s", lasts_s=seconds, repair=free, goal_s=GOAL_S + (seconds if long else 0.0))


def _make_read_only(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    """Mount the directory read-only over itself, which affects files that are opened from now on."""
    seconds, runs = round(rng.uniform(*SECONDS), 1), str(deployment.runs)
    if (deployment.runs / "filler").exists():  # it could not be removed meanwhile
        raise NoTargetError
    subprocess.run(["mount", "--bind", runs, runs], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", runs], check=True)
    # lazily, because its files may be open for reading
    return FaultEffect(f"for {seconds} s", lasts_s=seconds, repair=lambda: _run(["umount", "-l", runs]))


def _run(argv: list[str]) -> None:
    subprocess.run(argv, check=True)


def _slow_down(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    seconds = round(rng.uniform(*SECONDS), 1)
    deployment.slow_files.touch()
    return FaultEffect(
        f"for {seconds} s", lasts_s=seconds, repair=lambda: deployment.slow_files.unlink(missing_ok=True)
    )


def empty(path: Path) -> None:
    """Truncate a file to zero bytes, as a crashed file server may."""
    with contextlib.suppress(OSError), path.open("r+b") as handle:
        handle.truncate(0)


def tear(path: Path) -> None:
    """Truncate a file in the middle of its last line."""
    with contextlib.suppress(OSError), path.open("r+b") as handle:
        data = handle.read()
        last = data.rstrip(b"\n").rfind(b"\n") + 1
        handle.truncate((last + len(data)) // 2)


def _empty_records(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    """Empty files that are rewritten frequently."""
    attempt = deployment.run.latest()
    files = [*(attempt.path / "agents").glob("*.json"), *(attempt.path / "state").glob("*.json"), attempt.fleet_file]
    chosen = [path for path in sorted(files) if rng.random() < 0.5]
    for path in chosen:
        empty(path)
    return FaultEffect(f"{len(chosen)} of {len(files)}", lasts_s=3.0)


def _between_attempts(
    damage: Callable[[FaultyDeployment, Random, FaultEffect], str],
) -> Callable[[FaultyDeployment, Random], FaultEffect]:
    """Kill a trainer rank, and damage files after the attempt has ended and before the next one begins."""

    def inject(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
        process, os_process = one_of(rng, deployment.living("trainer"))
        attempt = deployment.run.latest()
        effect = FaultEffect(f"after {process.name} was killed", goal_s=goal_of("trainer"))

        def noticed(status: RunStatus) -> bool:
            if not effect.repaired and attempt.end() is not None and deployment.wait_for_no_processes(30.0):
                effect.repaired = True
                effect.target += f": {damage(deployment, rng, effect)}"
            return status.attempt > attempt.number

        effect.noticed, effect.lasts_s = noticed, 3600.0  # the damage happens then, and is not repaired
        os_process.send(signal.SIGKILL)
        return effect

    return inject


def _tear_lines(deployment: FaultyDeployment, rng: Random, effect: FaultEffect) -> str:
    attempt = deployment.run.latest()
    files = [*(attempt.path / "events").glob("*.jsonl"), deployment.run.path / "metrics.jsonl"]
    for path in files:
        tear(path)
    heartbeats = list((attempt.path / "agents").glob("*.json"))
    for path in heartbeats:
        empty(path)
    return f"{len(files)} last lines, {len(heartbeats)} heartbeats"


def _empty_newest_checkpoint(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    """Only if it is newer than at the end of any attempt: three failed attempts at the same step end a run."""
    ends = [end.committed_step or 0 for attempt in deployment.run.attempts() if (end := attempt.end()) is not None]
    if (checkpoints.newest(deployment.run.path) or 0) <= max(ends, default=0):
        raise NoTargetError
    return _between_attempts(_empty_checkpoint)(deployment, rng)


def _empty_checkpoint(deployment: FaultyDeployment, rng: Random, effect: FaultEffect) -> str:
    step = checkpoints.newest(deployment.run.path)
    assert step is not None, "it was there before the attempt ended"
    directory = checkpoints.step_dir(deployment.run.path, step)
    path = rng.choice(sorted(path for path in directory.rglob("*") if path.is_file()))
    empty(path)
    effect.damaged[deployment.run.latest().number] = step
    return str(path.relative_to(deployment.run.path))


FILES = (
    Kind("disk full", "not a byte is free in the directory of runs for 3 to 15 s", _fill, loses_records=True),
    Kind(
        "disk read-only",
        "the directory of runs is read-only for 3 to 15 s",
        _make_read_only,
        loses_records=True,
    ),
    Kind("disk slow", "for 3 to 15 s, every fsync and every rename takes a second longer", _slow_down),
    Kind("records emptied", "every other heartbeat and state is a file of 0 bytes", _empty_records),
    Kind(
        "lines torn between attempts",
        "as trainer killed; before the next attempt, last lines of events and metrics are cut, heartbeats emptied",
        _between_attempts(_tear_lines),
        loses_records=True,
    ),
    Kind(
        "checkpoint emptied between attempts",
        "as trainer killed; before the next attempt, a file of the newest checkpoint is emptied",
        _empty_newest_checkpoint,
    ),
    Kind(
        "disk full for long",
        "not a byte is free for 45 to 60 s, which is longer than the timeout of an unresponsive head",
        lambda deployment, rng: _fill(deployment, rng, long=True),
        loses_records=True,
    ),
)
