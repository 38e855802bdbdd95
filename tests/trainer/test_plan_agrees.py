"""What the plan says about the trainer is what the trainer is."""

from __future__ import annotations

from primeslurm.plan.checks.unbuilt import FAMILIES
from primeslurm.plan.estimate import MICRO_BATCH_TOKENS
from primeslurm.trainer import models, parallel


def test_families_are_those_that_are_built() -> None:
    assert set(FAMILIES) == set(models.FAMILIES)


def test_micro_batches_are_as_large_as_the_estimate_assumes() -> None:
    assert parallel.MICRO_BATCH_TOKENS == MICRO_BATCH_TOKENS
