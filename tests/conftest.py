"""What all tests share."""

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

gc.disable()  # until all is imported, which takes a quarter less time then
# Before a module of ours has something done in forked processes: coverage's tracer takes a lock for what is new to it
# there, and another thread may have held that at the fork. This is no Python function, whose call would be traced, too.
os.register_at_fork(after_in_child=functools.partial(sys.settrace, None))
sweeper = temporary.use_own()
# Processes of a run get this from their agent; those that tests start, from here.
os.environ["PRIMESLURM_SECRET"] = "5ec7e7" * 10 + "5ec7"
# Threads of torch wait for one another by spinning: two take three times as long as one where others have the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but not in what is there already (`primeslurm.base.imports`)."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """End a process that has run its tests and does not end by itself; the stacks of its threads say why."""
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)


@pytest.fixture(scope="module")
def unmeasured() -> Iterator[None]:
    """Coverage measures neither what a module's tests run nor what they start.

    For modules that compute for minutes, most of it in others' code, or in ours that the tests of its parts measure:
    all Python takes a third longer while it is measured.
    """
    with pytest.MonkeyPatch.context() as patch, untraced():
        for name in measuring():
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """This process as the only rank of a trainer."""
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
