"""Names of other tools are explained by fields that exist."""

from __future__ import annotations

from importlib import resources
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.fields.section import field_type, members
from primeslurm.recipe.reading.aliases import (
    Alias,
    ValueAlias,
    aliases,
    find_alias,
    find_value,
    keys_of,
    tools,
    value_aliases,
)


def types_of(field: str, model: type[BaseModel] = Recipe) -> list[Any]:
    """Return the types of a field; empty if it does not exist. Any name is a key of a mapping."""
    types: list[Any] = [model]
    for part in field.split("."):
        name, is_list = part.removesuffix("[]"), part.endswith("[]")
        sections = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]
        mappings = [get_args(each)[1] for each in types if get_origin(each) is dict]
        types = [m for s in sections for m in members(field_type(s, name)) if m is not None]
        types += [m for mapping in mappings for m in members(mapping)]
        if is_list:
            types = [m for each in types for m in members(get_args(each)[0])]
    return types


@pytest.mark.parametrize("alias", aliases(), ids=lambda alias: alias.field)
def test_field_of_an_alias_exists_and_its_advice_is_one_line(alias: Alias) -> None:
    assert types_of(alias.field, Site if alias.of_site else Recipe), f"there is no field {alias.field}"
    assert alias.note and "\n" not in alias.advice and len(alias.advice) <= 200
    assert alias.keys and all(alias.keys.values())


@pytest.mark.parametrize("alias", value_aliases(), ids=lambda alias: f"{alias.field}={alias.ours}")
def test_value_alias_names_a_choice_and_is_not_one_itself(alias: ValueAlias) -> None:
    types = types_of(alias.field)
    choices = {choice for each in types if get_origin(each) is Literal for choice in get_args(each)}
    assert alias.ours in choices and not choices & set(alias.theirs)


@pytest.mark.parametrize("tool", tools())
def test_table_has_many_keys_of_each_tool_and_no_field_of_a_recipe(tool: str) -> None:
    keys = {key for key, _ in keys_of(tool)}
    assert len(keys) >= 25
    assert not keys & {info.alias or name for name, info in Recipe.model_fields.items() if name != "seed"}


def test_table_has_no_misspelt_attributes() -> None:
    entries = yaml.safe_load(resources.files("primeslurm.recipe.reading").joinpath("aliases.yaml").read_text())["keys"]
    assert {key for entry in entries for key in entry} == {"field", "site", "note", *tools()}
    assert all(("field" in entry) != ("site" in entry) for entry in entries)


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ("slurm.partition", "slurm.train.partition"),
        ("inference.tensor_parallel_size", "inference.parallel.tp"),
        ("--tensor-parallel-size", "inference.parallel.tp"),
        ("train_batch_size", "orchestrator.batch_size"),
        ("rollout.n", "orchestrator.group_size"),
        ("rollout.val_kwargs.n", "evaluation.environments[].samples"),
        ("learning_rate", "trainer.optimizer.lr"),
        ("actor_rollout_ref.actor.optim.lr", "trainer.optimizer.lr"),
        ("trainer.kl_coef", "trainer.loss.ref_kl"),
        ("trainer.gradient_accumulation", "trainer.micro_batch_tokens"),
        ("orchestrator.train.sampling.max_completion_tokens", "orchestrator.sampling.max_tokens"),
        ("trainer.model.ac", "trainer.parallelism.activation_checkpointing"),
        ("slurm.gres", "nodes.default.gres"),
        ("colocate", "deployment.colocated"),
        ("actor_rollout_ref.hybrid_engine", "deployment.colocated"),
        ("vllm_mode", "deployment.colocated"),
        ("critic.optim.lr", "orchestrator.advantages"),
        ("orchestrator.sampling.n", "orchestrator.group_size"),
        ("model_name", "model.path"),
        ("actor_rollout_ref.actor.entropy_coeff", "trainer.loss.function"),
        ("actor_rollout_ref.actor.kl_loss_type", "trainer.loss.ref_kl"),
        ("actor_rollout_ref.rollout.name", "inference"),
        ("trainer.critic_warmup", "orchestrator.advantages"),
        ("data.truncation", "seq_len"),
    ],
)
def test_key_is_found_by_its_last_parts(typed: str, field: str) -> None:
    alias = find_alias(typed)
    assert alias is not None and alias.field == field


@pytest.mark.parametrize("typed", ["n", "foo.bar", "trainer.name", "model", "inference.type", "batch_sizes", ""])
def test_generic_word_is_not_an_alias(typed: str) -> None:
    assert find_alias(typed) is None


def test_value_is_found_regardless_of_case() -> None:
    loss = find_value("trainer.loss.type", "PPO")
    assert loss is not None and loss.ours == "grpo_clip"
    assert find_value("orchestrator.advantages", "gae") is not None
    assert find_value("trainer.optimizer.type", "gae") is None
