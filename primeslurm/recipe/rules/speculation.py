"""Rules for `inference.speculative`: each method reads its own fields."""

from __future__ import annotations

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe

_READERS = {"model": ("eagle", "eagle3"), "prompt_lookup_min": ("ngram",), "prompt_lookup_max": ("ngram",)}
"""Methods that read a field."""


def violations(recipe: Recipe) -> list[Violation]:
    """Return fields of `inference.speculative` that are missing, unused or contradictory."""
    speculation = recipe.inference.speculative
    if speculation is None:
        return []
    section, method, problems = "inference.speculative", speculation.method, list[Violation]()
    for name, methods in _READERS.items():
        value = getattr(speculation, name)
        if value is not None and method not in methods:
            why, fix = f"method {method} does not read it", f"leave it out, or use method: {methods[-1]}"
            problems.append(Violation(f"{section}.{name}", str(value), why, fix))
    if method in _READERS["model"] and speculation.model is None:
        why, fix = f"method {method} needs a draft model", "set it to a directory or hub id, or use method: ngram"
        problems.append(Violation(f"{section}.model", "", why, fix))
    shortest, longest = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    if method == "ngram" and shortest is not None and longest is not None and shortest > longest:
        why, fix = f"is greater than prompt_lookup_max = {longest}", f"use at most {longest}"
        problems.append(Violation(f"{section}.prompt_lookup_min", str(shortest), why, fix))
    return problems
