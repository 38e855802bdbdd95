"""A whole run in which one of eight file operations fails, in every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.records.events.processes import ProcessExited, StorageFault
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events, rows
from primeslurm.wire.stored import checkpoints
from tests.emulated.test_submit import ROOT, place, python  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.usefixtures("unmeasured")]
STEPS = 4
HOOK = ROOT / "tests" / "emulated" / "faulty_files"


def _has_loop(process: str) -> bool:
    return process in ("head", "orchestrator") or process.startswith("agent-")


@pytest.mark.campaign
def test_run_completes_although_file_operations_fail(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    recipe, run = place / "small.yaml", RunDirectory(place / "runs" / "s")
    small = (ROOT / "tests" / "emulated" / "small.yaml").read_text()
    recipe.write_text(small.replace("orchestrator: {", "orchestrator: {rollout_transport: filesystem, ", 1))
    monkeypatch.setenv("EMULATED_FAULTY_FILES", str(run.path))
    example = ROOT / "examples" / "submit_from_python.py"
    done = python(place, example, recipe, "--emulate", "--name", "s", "--steps", str(STEPS), path=(HOOK, ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [attempt.number for attempt in run.attempts()] == [1]
    faults = (place / "runs" / "s.faults").read_text().splitlines()
    assert len(faults) > 500 and {line.split()[0] for line in faults} >= {"open", "stat", "replace", "listdir"}
    happened = events(run)
    assert any(isinstance(event, StorageFault) for event in happened)
    # Head, agents and orchestrator have an event loop, so they retry an operation for only half a second, and
    # write again in the next turn. By chance all tries of an operation may fail. The assertions
    # below show that nothing is lost. No other process gives up an operation.
    given_up = [event for event in happened if isinstance(event, StorageFault) and not event.recovered]
    assert [event for event in given_up if not _has_loop(event.process)] == []
    assert [event.name for event in happened if isinstance(event, ProcessExited) and event.state == "failed"] == []
    assert [row["step"] for row in rows(run.path)] == list(range(1, STEPS + 1))
    assert checkpoints.newest(run.path) == STEPS
    assert checkpoints.damage(checkpoints.step_dir(run.path, STEPS)) == []
    assert list((run.path / "checkpoints").glob("*.damaged-*")) == []
    assert not (place / ".primeslurm" / "clusters" / "emulate-s").exists()
