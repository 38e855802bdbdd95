"""What unit tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

from primeslurm import files
from tests.support.faulty_storage import FakeTime

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("primeslurm", deadline=None)
settings.load_profile("primeslurm")


@pytest.fixture(autouse=True)
def storage_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Time as operations on files see it: pauses between tries pass at once, and no fault is known from before."""
    time = FakeTime()
    monkeypatch.setattr(files, "clock", lambda: time.now)
    monkeypatch.setattr(files, "sleep", time.sleep)
    monkeypatch.setattr(files, "on_fault", None)
    monkeypatch.setattr(files, "on_pause", None)
    files.forget_faults()
    return time
