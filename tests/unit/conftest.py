"""What unit tests share."""

from __future__ import annotations

from hypothesis import settings

from tests.support.faulty_storage import storage_time  # noqa: F401 - for all tests

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("primeslurm", deadline=None)
settings.load_profile("primeslurm")
