"""Cuts the power of a run at random moments, and resumes it: `python -m tests.power.rounds --points 50 --seed 3`.

Each part of a run is hit equally often, however little it writes. Every round is forked from a process with all
imports. A first run without a cut counts the moments of each part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.power import attempt, verdict
from tests.power.attempt import Place
from tests.power.cutter import Cutter, points
from tests.power.disk import OPTIONS, Disk
from tests.support import temporary


@dataclass(frozen=True)
class Round:
    """Result of a power cut."""

    part: str
    """Part of the run that was, or should have been, hit."""
    at: int
    """Moment within the part."""
    options: str
    during: str
    """Activity at the cut; empty if the run had ended before."""
    committed: int
    """Newest step on disk afterwards."""
    groups: int
    """Number of acknowledged rollout groups."""
    lost: list[str]
    error: str
    """Error of the resume; empty if it succeeded."""
    seconds: float


def main() -> int:
    """Print a line of JSON per round. Exit with 1 if data was lost or a resume failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--moments", type=json.loads, help="of each part, as JSON; default: as many as in a run without a cut"
    )
    parser.add_argument("--out", type=Path, help="write the rounds there, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also unmounts the disk
    held = temporary.use_own()  # noqa: F841 - what killed processes leave goes with it
    beside = Path(tempfile.mkdtemp(prefix="power-"))
    disk = Disk(beside, OPTIONS[0])
    place = Place(beside, disk.path / "runs")
    try:
        attempt.prepare(place)
        rng = random.Random(options.seed)
        moments = options.moments or _moments(place, disk)
        print(f"moments: {json.dumps(moments)}", file=sys.stderr)
        rounds = []
        for part, at in points(options.points, moments, rng):
            rounds.append(_round(place, part, at, rng.choice(OPTIONS)))
            print(json.dumps(asdict(rounds[-1])), flush=True)
    finally:
        disk.remove()
        shutil.rmtree(beside)
    failed = [each for each in rounds if each.lost or each.error]
    print(f"{len(rounds)} power cuts, {len(failed)} with losses", file=sys.stderr)
    if options.out:
        document = {"seed": options.seed, "moments": moments, "rounds": [asdict(each) for each in rounds]}
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if failed else 0


def _moments(place: Place, disk: Disk) -> dict[str, int]:
    """Return how often each part of an undisturbed run writes."""
    disk.make()
    cutter = Cutter(disk)
    during, code = _live(place, cutter)
    disk.remove()
    if code or during:
        raise SystemExit(f"an undisturbed run failed during {during}: {code}")
    place.forget()
    return cutter.counts


def _round(place: Place, part: str, at: int, options: str) -> Round:
    disk, began = Disk(place.beside, options), time.monotonic()
    disk.make()
    try:
        cutter = Cutter(disk, part, at)
        during, code = _live(place, cutter)
        if during and not cutter.fired:
            log = (place.beside / "log").read_text()[-4000:]
            raise SystemExit(f"failed during {during} before the power was cut: {code}\n{log}")
        if not during:
            disk.cut()  # this run was shorter, and its end must survive
        disk.restart()
        told = place.acknowledged
        lost = _report(place, lambda: json.dumps(verdict.losses(place)))
        committed = verdict.checkpoints.newest(place.run.path) or 0
        error = _report(place, lambda: verdict.resume(place))
        groups = sum(each["kind"] == "group" for each in told)
        found = json.loads(lost) if lost.startswith("[") else [lost]
        return Round(part, at, options, during, committed, groups, found, error, round(time.monotonic() - began, 1))
    finally:
        place.forget()
        disk.remove()


def _live(place: Place, cutter: Cutter) -> tuple[str, int]:
    """Run until the end or the power cut. Return the activity at that time, and the exit code."""
    phases: dict[str, tuple[str, Callable[[], object]]] = {
        "submit": ("submit", lambda: attempt.submit(place)),
        "attempt 1": ("rest", lambda: _train(place, "first", True, cutter.doing)),
        "requeue": ("requeue", lambda: attempt.requeue(place)),
        "attempt 2": ("rest", lambda: _train(place, "second", False, cutter.doing)),
    }
    for name, (part, phase) in phases.items():
        code = _forked(place, phase, cutter, part)
        if code:
            return name, code
    return "", 0


def _train(place: Place, start: str, preempt: bool, doing: attempt.Doing) -> None:
    code = attempt.train(place, start, preempt, doing)
    if not attempt.succeeded(code):
        raise SystemExit(2)


def _report(place: Place, action: Callable[[], str]) -> str:
    """Return the result of an action in a separate process, or its error."""
    path = place.beside / "report"

    def write() -> None:
        try:
            text = action()
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
        path.write_text(text)

    path.unlink(missing_ok=True)
    code = _forked(place, write, None)
    return path.read_text() if path.exists() else f"ended with {code}"


def _forked(place: Place, action: Callable[[], object], cutter: Cutter | None, part: str = "rest") -> int:
    """Run an action in a separate process, with its output in `log`, and return the exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    log = os.open(place.beside / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        if cutter is None:
            action()
        else:
            cutter.watch()
            with cutter.doing(part):
                action()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
