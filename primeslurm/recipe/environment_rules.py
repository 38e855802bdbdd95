"""Rules between environments and what they share: batches, engines, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sections.curriculum import Curriculum
from primeslurm.recipe.sections.filters import Filters, Length
from primeslurm.recipe.sections.orchestrator import Environment


def violations(recipe: Recipe) -> list[Violation]:
    """Everything about environments that contradicts something else."""
    found = _sizes(recipe) + _filters("orchestrator.filters", recipe.orchestrator.filters)
    if recipe.environments and not any(environment.weight for environment in recipe.environments):
        fix = "leave it out for one of the environments"
        found.append(Violation("environments.0.weight", "0", "nothing would be trained", fix))
    for i, environment in enumerate(recipe.environments):
        found += _of(recipe, environment, f"environments.{i}")
    return found


def _of(recipe: Recipe, environment: Environment, place: str) -> list[Violation]:
    found, label = _filters(f"{place}.filters", environment.filters or ()), environment.label
    found += _curriculum(environment.curriculum, f"{place}.curriculum") if environment.curriculum else []
    wanted = recipe.sampling(environment).max_tokens
    if environment.sampling.max_tokens is not None and wanted is not None and wanted >= recipe.seq_len:
        why = f"leaves no room for a prompt of {label} in seq_len = {recipe.seq_len}"
        found.append(Violation(f"{place}.sampling.max_tokens", str(wanted), why))
    if environment.advantages == "opd" and recipe.teacher is None:
        fix = "add `teacher: {type: engines, path: ...}`"
        found.append(Violation(f"{place}.advantages", "opd", f"{label} needs a teacher", fix))
    plain = recipe.orchestrator.algorithm is None
    rule = environment.advantages or (recipe.orchestrator.advantages if plain else None)
    other = {"opd": "the teacher's, who is asked later", "rae": "relative to a running mean, not to a group's"}
    if rule in other and any(each.type == "zero_advantage" for each in recipe.filters(environment)):
        field = "orchestrator.filters" if environment.filters is None else f"{place}.filters"
        why = f"advantages of {label} are {other[rule]}"
        found.append(Violation(field, "zero_advantage", why, "leave it out"))
    return found


def _sizes(recipe: Recipe) -> list[Violation]:
    """Whole groups of these sizes, whichever finish first, must make batches of exactly batch_size rollouts."""
    options = recipe.orchestrator
    sizes = {options.group_size: "orchestrator.group_size"} if _default_used(recipe) else {}
    places = dict.fromkeys(sizes, "orchestrator.group_size")
    for i, environment in enumerate(recipe.environments):
        places.setdefault(recipe.group_size(environment), f"environments.{i}.group_size")
        sizes.setdefault(recipe.group_size(environment), f"the group_size of {environment.label}")
    largest = max(sizes)
    found = []
    if uneven := [size for size in sizes if options.batch_size % size]:
        nearest = max(largest, round(options.batch_size / largest) * largest)
        why = f"must be a multiple of {sizes[max(uneven)]} = {max(uneven)}"
        found.append(Violation("orchestrator.batch_size", str(options.batch_size), why, f"nearest: {nearest}"))
    for small, large in pairwise(sorted(sizes)):
        if large % small:
            why = f"must be a multiple of {sizes[small]} = {small}: batches could not be filled with whole groups"
            fix = f"nearest: {round(large / small) * small}"
            found.append(Violation(places[large], str(large), why, fix))
    inflight = options.max_inflight_rollouts
    if inflight is not None and inflight < largest:
        why = f"must be at least {sizes[largest]} = {largest}"
        found.append(Violation("orchestrator.max_inflight_rollouts", str(inflight), why, f"nearest: {largest}"))
    staleness, smallest = options.staleness, min(sizes)
    if staleness.rule in ("partial", "carry") and staleness.at_least > smallest:
        why = f"is more than {sizes[smallest]} = {smallest}: no group could be completed early"
        found.append(Violation("orchestrator.staleness.at_least", str(staleness.at_least), why, f"nearest: {smallest}"))
    return found


def _default_used(recipe: Recipe) -> bool:
    return not recipe.environments or any(each.group_size is None for each in recipe.environments)


def _filters(field: str, filters: Filters) -> list[Violation]:
    found = []
    for name in _repeated([each.type for each in filters]):
        found.append(Violation(field, name, "is there twice", "one filter of each type"))
    for i, each in enumerate(filters):
        if isinstance(each, Length) and each.max_tokens is not None and each.max_tokens < each.min_tokens:
            why = f"is less than min_tokens = {each.min_tokens}"
            found.append(Violation(f"{field}.{i}.max_tokens", str(each.max_tokens), why))
    return found


def _repeated(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _curriculum(curriculum: Curriculum, field: str) -> list[Violation]:
    found, shares = [], curriculum.shares
    if curriculum.hard >= curriculum.easy:
        why = f"must be below curriculum.easy = {curriculum.easy:g}"
        found.append(Violation(f"{field}.hard", f"{curriculum.hard:g}", why))
    if not shares.unseen:
        why = "nothing new would be drawn after the first example"
        found.append(Violation(f"{field}.shares.unseen", "0", why, "give it a share"))
    return found
