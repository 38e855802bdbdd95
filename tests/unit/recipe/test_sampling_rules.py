"""Training refuses sampling parameters that change the distribution."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from primeslurm.recipe.rules.sampling import changes

WHY = "the trainer scores tokens over the whole vocabulary, so importance ratios would be wrong"


def made(**changes: Any) -> Recipe:
    fields: dict[str, Any] = {"name": "x", "max_steps": 1, "seq_len": 64, "model": {"path": "m"}}
    return Recipe.model_validate({**fields, "environments": [{"id": "e"}], **changes})


def agent(**sampling: Any) -> dict[str, Any]:
    return {"id": "e", "name": "agent", "args": {"env": {"agent": {"sampling": sampling}}}}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (made(orchestrator={"sampling": {"top_p": 0.99}}), ["orchestrator.sampling.top_p = 0.99"]),
        (
            made(orchestrator={"sampling": {"top_p": 0.9, "top_k": 20}}),
            ["orchestrator.sampling.top_p = 0.9", "orchestrator.sampling.top_k = 20"],
        ),
        (
            made(
                orchestrator={"sampling": {"top_p": 0.9}},
                environments=[{"id": "a", "sampling": {"top_p": 0.5}}, {"id": "b", "sampling": {"top_k": 1}}],
            ),
            [
                "orchestrator.sampling.top_p = 0.9",
                "environments.0.sampling.top_p = 0.5",
                "environments.1.sampling.top_k = 1",
            ],
        ),
        (made(environments=[agent(min_p=0.1)]), ["environments.0.args.env.agent.sampling.min_p = 0.1"]),
        (
            made(environments=[agent(extra_body={"logit_bias": {"5": -100}, "bad_words": ["no"]})]),
            [
                "environments.0.args.env.agent.sampling.logit_bias = {'5': -100}",
                "environments.0.args.env.agent.sampling.bad_words = ['no']",
            ],
        ),
        (
            made(environments=[agent(temperature=0.5)]),
            [
                "environments.0.args.env.agent.sampling.temperature = 0.5: the trainer divides logits by 1, the"
                " temperature of the environment (set environments.0.sampling.temperature instead)"
            ],
        ),
    ],
)
def test_parameter_that_changes_the_distribution_is_refused(recipe: Recipe, expected: list[str]) -> None:
    found = [f"{each.field} = {each.value}: {each.why} ({each.fix})" for each in violations(recipe)]
    whole = [
        text if ": the trainer" in text else f"{text}: {WHY} (leave it out; evaluation may use it)" for text in expected
    ]
    assert found == whole


@pytest.mark.parametrize(
    "recipe",
    [
        made(orchestrator={"sampling": {"top_p": 1.0, "top_k": -1, "temperature": 0.6, "max_tokens": 9}}),
        made(orchestrator={"sampling": {"top_k": 0}}),
        made(orchestrator={"sampling": {"top_p": 0.9}}, environments=[{"id": "e", "sampling": {"top_p": 1}}]),
        made(environments=[{**agent(temperature=0.5, top_p=1, stop=["x"], seed=1), "sampling": {"temperature": 0.5}}]),
        made(environments=[{"id": "e", "args": {"env": {"agent": "x"}}}, {"id": "f", "args": {"env": ["agent"]}}]),
        made(environments=[{"id": "e", "args": {"env": {"user": {"sampling": {"temperature": 0}}}}}]),
        made(
            evaluation={
                "environments": [
                    {"id": "f", "sampling": {"temperature": 0, "top_p": 0.95, "top_k": 20}},
                    {**agent(min_p=0.1, temperature=0.3)},
                ]
            }
        ),
        made(
            task="eval",
            environments=[],
            evaluation={"environments": [{"id": "f", "sampling": {"top_p": 0.95}}]},
        ),
    ],
)
def test_unchanged_distribution_and_evaluation_are_accepted(recipe: Recipe) -> None:
    assert violations(recipe) == []


@pytest.mark.parametrize("temperature", [0, 0.009, 2.01, -1])
def test_temperature_outside_the_range_of_vllm_is_refused(temperature: float) -> None:
    # vLLM raises temperatures below 0.01 to 0.01. The trainer would divide logits by the value in the recipe.
    with pytest.raises(ValidationError):
        made(orchestrator={"sampling": {"temperature": temperature}})
    with pytest.raises(ValidationError):
        made(environments=[{"id": "e", "sampling": {"temperature": temperature}}])


TRAINED = {"temperature": 0.7, "top_p": 1.0, "top_k": -1}


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (TRAINED, []),
        ({**TRAINED, "max_tokens": 5, "cache_salt": "s", "stop": ["a"], "reasoning_effort": "low"}, []),
        ({"temperature": 0.7, "top_p": 1, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1, "logit_bias": {}}, []),
        ({}, ["temperature"]),  # vLLM takes 1
        ({"temperature": None}, ["temperature"]),
        ({"temperature": 0}, ["temperature"]),
        ({**TRAINED, "top_p": 0.5, "top_k": 5}, ["top_p", "top_k"]),
        ({**TRAINED, "top_p": 0, "repetition_penalty": 0}, ["top_p", "repetition_penalty"]),
        ({**TRAINED, "presence_penalty": -0.1, "frequency_penalty": 1}, ["presence_penalty", "frequency_penalty"]),
        ({**TRAINED, "n": 1, "min_tokens": 0}, []),
        ({**TRAINED, "n": 2}, ["n"]),
        ({**TRAINED, "thinking_token_budget": 0}, ["thinking_token_budget"]),  # it forces the end of the thoughts
        ({**TRAINED, "thinking_token_budget": None}, []),
        ({**TRAINED, "min_tokens": 4, "thinking_token_budget": 9}, ["min_tokens", "thinking_token_budget"]),
        (
            {**TRAINED, "structured_outputs": {"json": {}}, "allowed_token_ids": [4]},
            ["structured_outputs", "allowed_token_ids"],
        ),
        ({**TRAINED, "of_a_later_vllm": 3}, ["of_a_later_vllm"]),
    ],
)
def test_request_is_compared_with_the_recipe(requested: dict[str, object], expected: list[str]) -> None:
    assert changes(requested, TRAINED) == expected


def test_recorded_recipe_with_top_p_allows_the_same_top_p() -> None:
    assert changes({**TRAINED, "top_p": 0.95}, {**TRAINED, "top_p": 0.95}) == []
    assert changes({**TRAINED, "top_p": 0.9}, {**TRAINED, "top_p": 0.95}) == ["top_p"]
