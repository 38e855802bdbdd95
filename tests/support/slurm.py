"""Skips tests on machines that cannot run Slurm's daemons."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import pytest


def require_slurm(
    programs: Sequence[str] = ("munged", "slurmctld", "slurmd"), packages: str = "slurm-wlm munge"
) -> None:
    """Skip the test if these daemons cannot be started, but fail it in CI if they are not installed.

    Debian's `packages` contain them.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, because Slurm's daemons start jobs of other users")
    if missing := [name for name in programs if shutil.which(name) is None]:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(f"not installed: {', '.join(missing)} (on Debian: apt-get install {packages})")
