"""What counts as lost after a power cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.orchestrator.pipeline.progress import PROGRESS, RunProgress
from tests.power.attempt import Place
from tests.power.verdict import of_progress

TOLD = [{"kind": "progress", "attempt": 1, "next_step": 6, "done_step": 3}, {"kind": "recovering", "attempt": 2}]


@pytest.mark.parametrize(
    ("on_disk", "lost"),
    [
        pytest.param(RunProgress(1, 6, 3), False, id="what was told"),
        pytest.param(RunProgress(1, 5, 3), True, id="what was told before"),
        pytest.param(None, True, id="nothing"),
        pytest.param(RunProgress(2, 5, 4), False, id="another attempt's, which begins at what is committed"),
    ],
)
def test_acknowledged_progress_survives(on_disk: RunProgress | None, lost: bool, tmp_path: Path) -> None:
    place = Place(tmp_path / "beside", tmp_path / "runs")
    if on_disk is not None:
        on_disk.save(place.run.path / PROGRESS)
    assert bool(of_progress(place, TOLD)) is lost
