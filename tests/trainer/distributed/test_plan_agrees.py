"""What the plan says about the trainer is what the trainer is."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from transformers import AutoConfig

from primeslurm.models import GENERIC, Family, bundled, capabilities, model_builder
from primeslurm.models.hf_config import shape_of
from primeslurm.plan.estimates.parameters import count
from tests.trainer.families import CASES, GENERIC_CASES, Case, reference_of


@pytest.mark.parametrize("family", bundled(), ids=lambda family: family.name)
def test_families_are_those_that_are_built(family: Family) -> None:
    module = f"primeslurm.models.{family.name}.model"
    for model_type in family.model_types:
        build = model_builder.builder(model_type)
        assert build is not None and build is import_module(module).spec


@pytest.mark.parametrize("impl", ["auto", "custom", "hf"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_the_same_implementation_is_meant(family: str, impl: str) -> None:
    assert model_builder.is_generic(impl, AutoConfig.for_model(family)) == (capabilities(family, impl) is GENERIC)


# Layers that share an indexer are counted as if each had one.
COUNTED = [case for case in (*CASES, *GENERIC_CASES) if case.name != "glm_moe_dsa"]


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_parameters_are_counted_as_they_are_built(case: Case) -> None:
    config = case.config()
    with torch.device("meta"):
        parameters = dict(reference_of(case).from_config(config).named_parameters())
    seeing = {name for name in parameters if ".visual." in name}
    built = sum(parameters[name].numel() for name in parameters.keys() - seeing)
    counted = count(shape_of(config.to_dict()))
    # Biases of some projections, norms behind sublayers and layers with other numbers of heads are left out.
    assert counted.language == pytest.approx(built, rel=0.05)
    assert counted.vision == sum(parameters[name].numel() for name in seeing)
