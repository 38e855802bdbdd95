"""Rules for `inference.speculative`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from tests.support.recipes import recipe_data


def found(**speculative: Any) -> list[str]:
    recipe = Recipe.model_validate(recipe_data(inference={"speculative": {"num_tokens": 3} | speculative}))
    return [str(each) for each in violations(recipe) if each.field.startswith("inference.speculative")]


@pytest.mark.parametrize(
    ("speculative", "expected"),
    [
        ({"method": "eagle3"}, "inference.speculative.model: method eagle3 needs a draft model"),
        ({"method": "eagle"}, "method eagle needs a draft model (set it to a directory or hub id"),
        ({"method": "mtp", "model": "/m"}, "model = /m: method mtp does not read it (leave it out"),
        ({"method": "mtp", "prompt_lookup_max": 4}, "prompt_lookup_max = 4: method mtp does not read it"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min = 4: is greater than prompt_lookup_max = 3 (use at most 3)",
        ),
    ],
)
def test_wrong_section_is_one_violation(speculative: dict[str, Any], expected: str) -> None:
    (violation,) = found(**speculative)
    assert expected in violation


@pytest.mark.parametrize(
    "speculative",
    [
        {"method": "eagle3", "model": "/m"},
        {"method": "mtp"},
        {"method": "ngram", "prompt_lookup_min": 6},
        {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 3},
    ],
)
def test_right_sections_are_accepted(speculative: dict[str, Any]) -> None:
    assert found(**speculative) == []


def test_at_least_one_token_is_drafted() -> None:
    with pytest.raises(ValidationError, match=r"num_tokens[\s\S]*greater than or equal to 1"):
        found(method="ngram", num_tokens=0)
