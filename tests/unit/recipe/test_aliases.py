"""Names of other tools, and the fields of recipes and sites that they point at."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.alias_table import ALIASES, TOOLS, VALUE_ALIASES, Alias, ValueAlias
from primeslurm.recipe.reading.aliases import find_alias, find_value, keys_of
from primeslurm.recipe.reading.explain import field_type, members


def types_of(field: str) -> list[Any]:
    """What a field may hold; empty if there is no such field. `[]` steps into a list, any name into a mapping."""
    where, _, path = field.rpartition("site: ")
    types: list[Any] = [Site if field != path else Recipe]
    assert not where
    for part in path.split("."):
        name, is_list = part.removesuffix("[]"), part.endswith("[]")
        sections = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]
        mappings = [get_args(each)[1] for each in types if get_origin(each) is dict]
        types = [m for s in sections for m in members(field_type(s, name)) if m is not None]
        types += [m for mapping in mappings for m in members(mapping)]
        if is_list:
            types = [m for each in types for m in members(get_args(each)[0])]
    return types


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.field)
def test_an_alias_points_at_a_field_and_explains_it_in_one_line(alias: Alias) -> None:
    assert types_of(alias.field), f"there is no field {alias.field}"
    assert alias.note and "\n" not in alias.advice and len(alias.advice) <= 200
    assert alias.keys and set(alias.keys) <= set(TOOLS)


@pytest.mark.parametrize("alias", VALUE_ALIASES, ids=lambda alias: f"{alias.field}={alias.ours}")
def test_a_value_alias_points_at_a_choice_and_is_none_itself(alias: ValueAlias) -> None:
    types = types_of(alias.field)
    choices = {choice for each in types if get_origin(each) is Literal for choice in get_args(each)}
    assert alias.ours in choices and not choices & set(alias.theirs)


def test_no_field_that_exists_is_taken_for_another_tools() -> None:
    own = {info.alias or name for name, info in Recipe.model_fields.items()}
    for tool in TOOLS:
        assert not {key for key, _ in keys_of(tool)} & (own - {"seed"}), tool


def test_there_are_enough_names_of_each_tool() -> None:
    counts = {tool: len(list(keys_of(tool))) for tool in TOOLS}
    assert len(ALIASES) >= 80
    assert all(count >= 25 for count in counts.values()), counts


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
        ("slurm.gres", "site: nodes.default.gres"),
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
def test_a_key_is_found_by_its_end(typed: str, field: str) -> None:
    alias = find_alias(typed)
    assert alias is not None and alias.field == field


@pytest.mark.parametrize("typed", ["n", "foo.bar", "trainer.name", "model", "inference.type", "batch_sizes", ""])
def test_a_word_that_means_anything_is_no_alias(typed: str) -> None:
    assert find_alias(typed) is None


def test_a_value_is_found_whatever_its_case() -> None:
    loss = find_value("trainer.loss.type", "PPO")
    assert loss is not None and loss.ours == "grpo_clip"
    assert find_value("orchestrator.advantages", "gae") is not None
    assert find_value("trainer.optimizer.type", "gae") is None
