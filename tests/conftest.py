"""Fixtures of all tests."""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import primeslurm.trainer  # noqa: F401  (before any test imports torchtitan)
from tests.support import temporary
from tests.support.unmeasured import measuring, untraced

if TYPE_CHECKING:
    from primeslurm.trainer.distributed.world import World

gc.disable()  # enabled after the imports, which take a quarter less time without it
# Registered before our modules register functions for forked processes: coverage's tracer takes a lock for new code,
# which another thread may have held at the fork. `settrace` is not a Python function, so its call is not traced.
os.register_at_fork(after_in_child=functools.partial(sys.settrace, None))
sweeper = temporary.use_own()
# Agents set this for the processes of a run, and this module for those that tests start.
os.environ["PRIMESLURM_SECRET"] = "5ec7e7" * 10 + "5ec7"
# Threads of torch wait for each other in busy loops: two take three times as long as one if other processes use the
# cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Enable garbage collection, excluding the objects that exist already (`primeslurm.base.imports`)."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """End a process that does not end by itself after its tests, and print the stacks of its threads."""
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)


@pytest.fixture(scope="module")
def unmeasured() -> Iterator[None]:
    """Measure neither the module's tests nor their child processes.

    For modules that compute for minutes, mostly in other libraries or in code that other tests measure. Measuring makes
    Python a third slower.
    """
    with pytest.MonkeyPatch.context() as patch, untraced():
        for name in measuring():
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Yield this process as the only rank of a trainer."""
    from benchmarks.support.ports import free_port
    from benchmarks.support.servers import rank_environment
    from primeslurm.trainer.base.interrupt import SIGNAL, Interrupt
    from primeslurm.trainer.distributed.world import join

    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank_environment(0, 1, free_port()).items():
            patch.setenv(name, value)
        joined = join(Interrupt(), timeout_s=60)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})  # processes that later tests start inherit the mask
        yield joined
        joined.close()
