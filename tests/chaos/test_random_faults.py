"""A run recovers from a few random faults. `python -m tests.chaos` injects hundreds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.campaign import again
from tests.chaos.faulty_deployment import FaultyDeployment
from tests.chaos.kinds import switched_on
from tests.chaos.runner import Chaos, to_stderr
from tests.chaos.schedule import schedule
from tests.support.slurm import require_slurm

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
SEEDS = (1, pytest.param(5, marks=pytest.mark.campaign), pytest.param(7, marks=pytest.mark.campaign))
FAULTS, STEPS, OVERLAP = 3, 12, 0.3


@pytest.fixture(scope="module")
def deployment() -> Iterator[FaultyDeployment]:
    """A cluster, in a directory whose path is short: Slurm's Unix sockets lie below it."""
    require_slurm()
    with tempfile.TemporaryDirectory(prefix="chaos") as directory:
        deployment = FaultyDeployment(Path(directory))
        yield deployment
        deployment.end()
        deployment.down()


@pytest.mark.parametrize("seed", SEEDS)
def test_run_recovers_from_random_faults(deployment: FaultyDeployment, seed: int) -> None:
    kinds = switched_on(short=True)
    rounds = schedule(seed, FAULTS, kinds, OVERLAP)
    result = Chaos(deployment, seed, STEPS, to_stderr).run(rounds)
    repeat = again(seed, FAULTS, OVERLAP, kinds, STEPS)
    assert result.problems == [], "\n".join([*result.problems, "to repeat:", repeat])
    assert result.committed_steps_lost == 0 and result.fates.lost == 0
    # Half of the groups is enough, because the spool has no file of groups that finish while the disk is full.
    assert result.fates.trained >= STEPS * 16 / 2, "the spool watch missed trained groups"
    assert result.outcomes, "no fault was injected"
