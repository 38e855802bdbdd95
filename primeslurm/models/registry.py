"""Finds the families: the modules of this package, and those that installed packages add by an entry point."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from primeslurm.base.errors import UsageError, Violation
from primeslurm.models.family import GENERIC, Capabilities, Family, Parsers

ENTRY_POINTS = "primeslurm.families"
"""Group of the entry points by which packages add families; each names a `Family`."""


@cache
def bundled() -> tuple[Family, ...]:
    """List the families of this package: what its modules call FAMILY."""
    package = import_module("primeslurm.models")
    folders = (module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    return tuple(import_module(f"{package.__name__}.{folder}.spec").FAMILY for folder in folders)


@cache
def families() -> tuple[Family, ...]:
    """List all families, those of installed packages last.

    Raises:
        UsageError: a package's family cannot be imported, is none, or has a model type that another family has.
    """
    found, types = list(bundled()), set(model_types(bundled()))
    for point in entry_points(group=ENTRY_POINTS):
        try:
            family = point.load()
        except Exception as error:  # whatever the module of somebody else does
            raise _refused(point.value, f"cannot be imported: {type(error).__name__}: {error}") from error
        if not isinstance(family, Family):
            raise _refused(point.value, f"is a {type(family).__name__}, no {Family.__name__}")
        if both := types & family.model_types.keys():
            raise _refused(point.value, f"another family has the model type {', '.join(sorted(both))}")
        found.append(family)
        types |= family.model_types.keys()
    return tuple(found)


def _refused(value: str, why: str) -> UsageError:
    fix = "mend or uninstall the package that names it"
    return UsageError([Violation(f"entry point {ENTRY_POINTS}", value, why, fix)])


def family_of(model_type: str) -> Family | None:
    """Find the family that a `model_type` belongs to; None if the trainer has no code of its own for it."""
    return next((family for family in families() if model_type in family.model_types), None)


def model_types(among: Iterable[Family] | None = None) -> dict[str, Capabilities]:
    """Say what works with each model type that the trainer has code of its own for, in alphabetical order."""
    every = families() if among is None else among
    return dict(sorted(pair for family in every for pair in family.model_types.items()))


def capabilities(model_type: str, impl: str) -> Capabilities | None:
    """Say what works with a model type.

    Args:
        model_type: of config.json.
        impl: `model.impl` of the recipe: auto, hf or custom.

    Returns:
        None if there is no such implementation.
    """
    family = family_of(model_type)
    if impl == "hf" or (impl == "auto" and family is None):
        return GENERIC
    return family.model_types[model_type] if family else None


def parsers_of(model: str) -> Parsers:
    """Find the parsers of a model, by the last part of its path.

    Of two patterns in a name the later one holds, and of two at one place the longer one: a Qwen3 that learned from
    DeepSeek-R1 is named for both, in this order, and Qwen3-Coder is no plain Qwen3.
    """
    name = model.rstrip("/").rpartition("/")[2].lower()
    places = [
        (match.start(), match.end(), parsers)
        for family in families()
        for pattern, parsers in family.parsers.items()
        for match in re.finditer(pattern, name)
    ]
    return max(places, key=lambda place: place[:2], default=(0, 0, Parsers()))[2]


def lora_targets(among: Iterable[Family] | None = None) -> frozenset[str]:
    """List every layer that recipes may name for adapters of some family."""
    return frozenset().union(*(family.lora_targets for family in (families() if among is None else among)))
