"""A few random faults with each of three seeds; `python -m tests.chaos` does hundreds."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.campaign import again
from tests.chaos.kinds import switched_on
from tests.chaos.runner import Chaos, to_stderr
from tests.chaos.scene import Scene
from tests.chaos.schedule import schedule

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
SEEDS = (1, 5, 7)
FAULTS, STEPS, OVERLAP = 3, 12, 0.3


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """A cluster, in a directory whose path is short: Slurm's Unix sockets lie below it."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("needs Slurm's daemons and root")
    with tempfile.TemporaryDirectory(prefix="chaos") as directory:
        found = Scene(Path(directory))
        yield found
        found.end()
        found.down()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_gets_over_random_faults(scene: Scene, seed: int) -> None:
    kinds = switched_on(short=True)
    rounds = schedule(seed, FAULTS, kinds, OVERLAP)
    result = Chaos(scene, seed, STEPS, to_stderr).suffer(rounds)
    repeat = again(seed, FAULTS, OVERLAP, kinds, STEPS)
    assert result.problems == [], "\n".join([*result.problems, "to repeat:", repeat])
    assert result.committed_steps_lost == 0 and result.fates.lost == 0
    # groups that come while the disk is full are in memory alone
    assert result.fates.trained >= STEPS * 16 / 2, "the watch of the spool has not seen what was trained"
    assert result.outcomes, "no fault has happened"
