"""Settings of unit tests."""

from __future__ import annotations

from hypothesis import settings

from tests.support.faulty_storage import storage_time  # noqa: F401 - for all tests

# The duration of an example depends mostly on the load of the machine.
settings.register_profile("primeslurm", deadline=None, max_examples=40)
settings.load_profile("primeslurm")
