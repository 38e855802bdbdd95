"""Limits of the processes that an agent starts."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from primeslurm.node.agent.child_process import Child


def test_processes_may_open_as_many_files_as_the_hard_limit_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        child = Child(["sh", "-c", "ulimit -Sn; ulimit -Hn"], dict(os.environ), tmp_path / "log", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    while child.poll() is None:
        time.sleep(0.01)
    assert (tmp_path / "log").read_text().split()[-2:] == [str(hard)] * 2
