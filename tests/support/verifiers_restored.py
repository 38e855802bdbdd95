"""Undoes the changes that `sandbox.install` makes to verifiers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from verifiers.v1 import runtimes
from verifiers.v1.interception import server
from verifiers.v1.runtimes import apptainer, e2b, limiters
from verifiers.v1.runtimes import subprocess as unprotected
from verifiers.v1.utils.loaders import harness_class

CHANGED = (
    (runtimes, "ApptainerRuntime"),
    (runtimes, "DockerRuntime"),
    (runtimes, "PodmanRuntime"),
    (runtimes, "SubprocessRuntime"),
    (unprotected, "CACHE_DIR"),
    (apptainer, "_ROOT"),
    (e2b, "_TEMPLATE_LOCK_DIR"),
    (limiters, "LIMITER_DIR"),
    (server, "MAX_REQUEST_BODY"),
)


@contextmanager
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore verifiers at the end of the test."""
    for module, name in CHANGED:
        monkeypatch.setattr(module, name, getattr(module, name))
    for harness in ("mini_swe_agent", "terminus_2"):
        monkeypatch.setattr(harness_class(harness), "NEEDS_CONTAINER", True)
    given = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - given.keys():
            del os.environ[name]
        os.environ.update(given)
