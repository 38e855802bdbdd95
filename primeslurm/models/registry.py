"""Registry of model families: the folders of this package, and families of other packages by entry point."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from primeslurm.base.errors import UsageError, Violation
from primeslurm.models.family import GENERIC, Capabilities, Family, Parsers

# Group of the entry points by which packages add families. Each entry point names a `Family`.
ENTRY_POINTS = "primeslurm.families"


@cache
def bundled() -> tuple[Family, ...]:
    """Return the families of this package: the record `FAMILY` in each folder's module `spec`."""
    package = import_module("primeslurm.models")
    folders = [f"{package.__name__}.{item.name}" for item in pkgutil.iter_modules(package.__path__) if item.ispkg]
    return tuple(_with_builder(import_module(f"{folder}.spec").FAMILY, folder) for folder in folders)


@cache
def families() -> tuple[Family, ...]:
    """Return all families, those of other packages last.

    Raises:
        UsageError: An entry point cannot be imported, is not a Family, or has a model type that is already taken.
    """
    registered, types = list(bundled()), set(model_types(bundled()))
    for point in entry_points(group=ENTRY_POINTS):
        try:
            family = point.load()
        except Exception as error:  # importing the module of another package may raise anything
            raise _entry_point_error(point.value, f"cannot be imported: {type(error).__name__}: {error}") from error
        if not isinstance(family, Family):
            raise _entry_point_error(point.value, f"is a {type(family).__name__}, not a {Family.__name__}")
        if taken := types & family.model_types.keys():
            # A second implementation of a model type would make results depend on the order of installation.
            raise _entry_point_error(point.value, f"another family has the model type {', '.join(sorted(taken))}")
        registered.append(_with_builder(family, point.module.rpartition(".")[0]))
        types |= family.model_types.keys()
    return tuple(registered)


def _with_builder(family: Family, package: str) -> Family:
    return replace(family, builder=family.builder or f"{package}.model".lstrip("."))


def _entry_point_error(value: str, why: str) -> UsageError:
    fix = "repair or uninstall the package that provides it"
    return UsageError([Violation(f"entry point {ENTRY_POINTS}", value, why, fix)])


def family_of(model_type: str) -> Family | None:
    """Return the family of a `model_type`, or None if the trainer has no implementation of its own for it."""
    return next((family for family in families() if model_type in family.model_types), None)


def model_types(among: Iterable[Family] | None = None) -> dict[str, Capabilities]:
    """Return the capabilities of every model type of some families (default: all), in alphabetical order."""
    chosen = families() if among is None else among
    return dict(sorted(pair for family in chosen for pair in family.model_types.items()))


def capabilities(model_type: str, impl: str) -> Capabilities | None:
    """Return the capabilities of a model type under `model.impl` (auto, hf or custom).

    None means that there is no such implementation.
    """
    family = family_of(model_type)
    if impl == "hf" or (impl == "auto" and family is None):
        return GENERIC
    return family.model_types[model_type] if family else None


def parsers_of(model: str) -> Parsers:
    """Return vLLM's parsers for a model, by the last part of its path or hub id."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    matches = [
        (match.start(), match.end(), parsers)
        for family in families()
        for pattern, parsers in family.parsers.items()
        for match in re.finditer(pattern, name)
    ]
    # The last match wins: DeepSeek-R1-0528-Qwen3-8B is a Qwen3. Of two at one place the longer: Qwen3-Coder.
    return max(matches, key=lambda match: match[:2], default=(0, 0, Parsers()))[2]


def lora_targets(among: Iterable[Family] | None = None) -> frozenset[str]:
    """Return every layer name that some family (default: of all) accepts in `trainer.lora.targets`."""
    return frozenset().union(*(family.lora_targets for family in (families() if among is None else among)))
