"""Limits of the processes that an agent starts."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from primeslurm.node.agent.child_process import Child
from tests.support.waiting import wait_until


def test_processes_may_open_as_many_files_as_the_hard_limit_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        child = Child(["sh", "-c", "ulimit -Sn; ulimit -Hn"], dict(os.environ), tmp_path / "log", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: child.poll() is not None)
    assert (tmp_path / "log").read_text().split()[-2:] == [str(hard)] * 2
