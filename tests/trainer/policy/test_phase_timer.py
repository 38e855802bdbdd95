"""The trainer's time per phase, and the fraction of it that waits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.clock import Clock
from tests.trainer.conftest import make_timer


def test_step_has_gpu_hours_and_the_fraction_without_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    timer = make_timer(tmp_path)
    for wait_s, work_s in ((30.0, 60.0), (0.0, 36.0)):
        with timer.phase("wait"):
            clock.now += wait_s
        with timer.phase("optimizer"):
            clock.now += work_s
        clock.now += 10  # between phases
        metrics = timer.take(gpus=8)
        elapsed_s = wait_s + work_s + 10
        assert metrics["gpu_hours"] == pytest.approx(8 * elapsed_s / 3600)
        assert metrics["idle_fraction"] == pytest.approx(wait_s / elapsed_s)
        assert metrics["seconds/optimizer"] == work_s
