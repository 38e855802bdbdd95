"""`submit --emulate` as users run it: the GLM-5 recipe with 28 nodes, and from Python."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from primeslurm.base.errors import RunError
from primeslurm.records.events.policy import EngineUpdated
from primeslurm.records.events.processes import ProcessStarted
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events, rows
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.weight_transfer import filesystem
from tests.support.attacks import Targets, successful_attacks
from tests.support.slurm import require_slurm
from tests.support.strangers import watching_for
from tests.support.unmeasured import unmeasured
from tests.support.waiting import bytes_below, run_until_stalled

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.usefixtures("unmeasured")]
ROOT = Path(__file__).resolve().parents[2]
STEPS = 3


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a home directory with a short path, as Slurm's Unix sockets need."""
    with tempfile.TemporaryDirectory(prefix="ps") as directory:
        yield Path(directory)


def python(place: Path, *words: str | Path, path: Sequence[Path] = (ROOT,)) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` as a user whose home is `place`, with the directories `path` on PYTHONPATH."""
    require_slurm()
    env = unmeasured() | {"HOME": str(place), "PYTHONPATH": os.pathsep.join(map(str, path))}
    argv = [sys.executable, *map(str, words)]
    return run_until_stalled(argv, place, env, lambda: bytes_below(place, "runs/*/attempts/*/events/*.jsonl"))


class Neighbour(threading.Thread):
    """Tries all attacks on a run as another Unix user, as soon as all of its processes exist."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(daemon=True)
        self._run, self.over = run, threading.Event()
        self.targets: Targets | None = None
        self.worked: dict[str, list[str]] = {"nothing was tried": []}

    def run(self) -> None:
        while not self.over.wait(0.1):
            with contextlib.suppress(RunError, ValueError):
                wanted = len(self._run.attempt(1).plan().processes())
                targets = Targets.of(self._run.path)
                if len(targets.pids) > wanted and rows(self._run.path):
                    self.targets, self.worked = targets, successful_attacks(targets)
                    return


def test_script_submits_and_waits_unaffected_by_another_user(place: Path) -> None:
    example, recipe = ROOT / "examples" / "submit_from_python.py", place / "small.yaml"
    small = (ROOT / "tests" / "emulated" / "small.yaml").read_text()
    recipe.write_text(small.replace("orchestrator: {", "orchestrator: {rollout_transport: filesystem, ", 1))
    run, steps = RunDirectory(place / "runs" / "s"), 3 * STEPS  # enough for all attacks before its end
    place.chmod(0o755)  # as homes and directories of runs often are; the run directory itself is private
    neighbour = Neighbour(run)
    neighbour.start()
    with watching_for(run.path / "secret"):
        done = python(place, example, recipe, "--emulate", "--name", "s", "--steps", str(steps))
    neighbour.over.set()
    neighbour.join()
    assert neighbour.worked == {}
    assert neighbour.targets is not None and neighbour.targets.places and neighbour.targets.claims
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"submitted s to {run.path}\ns completed: step {steps} of {steps}\n"
    assert run.attempt(1).plan().emulated and checkpoints.newest(run.path) == steps
    assert (run.path / "batches" / "1").is_dir(), "batches were given as files"
    assert not (place / ".primeslurm" / "clusters" / "emulate-s").exists()


@pytest.mark.campaign
def test_glm5_on_28_nodes_and_one_for_a_teacher(place: Path) -> None:
    command = ["-m", "primeslurm", "submit", ROOT / "recipes" / "glm5_pd.yaml", "--emulate", "--wait"]
    settings = [f"max_steps={STEPS}", "teacher={type: engines, path: /models/teacher}", "orchestrator.advantages=opd"]
    options = ["--name", "g", *(word for setting in settings for word in ("--set", setting))]
    done = python(place, *command, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory(place / "runs" / "g")
    plan, end = run.attempt(1).plan(), run.attempt(1).end()
    assert (plan.totals.nodes, plan.totals.gpus, plan.totals.engines) == (34, 232, 128)
    assert end is not None and (end.outcome, end.committed_step) == ("completed", STEPS)
    happened = events(run)
    assert sum(isinstance(event, ProcessStarted) for event in happened) == len(plan.processes()), (
        "something was restarted"
    )
    assert [row["step"] for row in rows(run.path)] == list(range(1, STEPS + 1))
    assert all("teacher/kl" in row for row in rows(run.path)) and plan.totals.teacher_engines == 8
    assert {e.engine for e in happened if isinstance(e, EngineUpdated) and e.version == STEPS} == {
        p.name for p in plan.processes() if p.role in ("prefill", "decode")
    }
    assert checkpoints.damage(checkpoints.step_dir(run.path, STEPS)) == []
    assert filesystem.damage(filesystem.version_dir(run.path, STEPS)) == []
    assert not (place / ".primeslurm" / "clusters" / "emulate-g").exists()
