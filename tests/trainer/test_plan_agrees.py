"""What the plan says about the trainer is what the trainer is."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from primeslurm.plan.estimate import MICRO_BATCH_TOKENS
from primeslurm.plan.families import FAMILIES, GENERIC, capabilities
from primeslurm.trainer import models, step


def test_families_are_those_that_are_built() -> None:
    assert set(FAMILIES) == set(models.FAMILIES)


@pytest.mark.parametrize("impl", ["auto", "custom", "hf"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_the_same_implementation_is_meant(family: str, impl: str) -> None:
    assert models.is_generic(impl, AutoConfig.for_model(family)) == (capabilities(family, impl) is GENERIC)


def test_micro_batches_are_as_large_as_the_estimate_assumes() -> None:
    assert step.MICRO_BATCH_TOKENS == MICRO_BATCH_TOKENS
