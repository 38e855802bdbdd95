"""Names that other tools give to fields: verl, slime, prime-rl, vLLM, sbatch, and transformers and TRL.

The names are in `aliases.yaml`. `check` uses them to explain unknown keys and values, and scripts/migration.py writes
them into the migration pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

# These words mean too much alone. A key that ends in one of them needs a second word that agrees.
_GENERIC = re.compile(
    "algo|alpha|beta|container|cpu|data|delta|dtype|enable|env|error|export|format|freq|function|id|interval|load|logger"
    "|mem|mode|model|modules?|n|name|nodes|optim|output|path|policy|port|rank|ratio|runtime|sampling|save|signal|source"
    "|step|time|timeout|tools|type"
)


@dataclass(frozen=True)
class Alias:
    """A field, and the keys of other tools that mean the same."""

    field: str
    """Dotted path in a recipe, or in a site file. `[]` stands for each entry of a list."""
    of_site: bool
    note: str
    """Meaning of the field, or the difference to the other tools, in one phrase."""
    keys: Mapping[str, tuple[str, ...]]
    """Keys by tool, with dots between sections and without leading dashes."""

    @property
    def advice(self) -> str:
        """Advice to use the field or value, for the end of a message."""
        return f"use {self.field}{' of the site file' if self.of_site else ''}: {self.note}"


@dataclass(frozen=True)
class ValueAlias:
    """A choice of a field, and the values of other tools that mean the same."""

    field: str
    theirs: tuple[str, ...]
    ours: str
    note: str

    @property
    def advice(self) -> str:
        """Advice to use the field or value, for the end of a message."""
        return f"use {self.ours}: {self.note}"


@cache
def tools() -> dict[str, str]:
    """Return the display name of each tool, by the key that `Alias.keys` uses."""
    return dict(_table()["tools"])


@cache
def aliases() -> tuple[Alias, ...]:
    """Return all aliases of keys, in the order of a recipe's sections."""
    return tuple(
        Alias(
            entry.get("field") or entry["site"],
            "site" in entry,
            entry["note"],
            {tool: tuple(entry[tool]) for tool in tools() if tool in entry},
        )
        for entry in _table()["keys"]
    )


@cache
def value_aliases() -> tuple[ValueAlias, ...]:
    return tuple(ValueAlias(**{**entry, "theirs": tuple(entry["theirs"])}) for entry in _table()["values"])


@cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("aliases.yaml").read_text("utf-8")
    # libyaml reads the table in 8 ms, the Python parser in 70 ms.
    table: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return table


def keys_of(tool: str) -> Iterator[tuple[str, Alias]]:
    """List the keys of one tool with their aliases, in the order of a recipe's sections."""
    return ((key, alias) for alias in aliases() for key in alias.keys.get(tool, ()))


def find_alias(path: str, min_parts: int = 1) -> Alias | None:
    """Return the alias whose key agrees with the most parts at the end of an unknown key."""
    parts = _normal(path)
    best: tuple[int, Alias | None] = min_parts - 1, None
    for alias in aliases():
        for key in (key for keys in alias.keys.values() for key in keys):
            count = _matching_parts(parts, _normal(key))
            # Advice to use the key that the user wrote would not help.
            if count > best[0] and (alias.field != path or alias.of_site):
                best = count, alias
    return best[1]


def find_value(field: str, value: str) -> ValueAlias | None:
    """Return the alias of a value that is not a choice of the field. `field` has no indices of list entries."""
    word = value.strip().lower()
    return next((alias for alias in value_aliases() if alias.field == field and word in alias.theirs), None)


def _normal(path: str) -> list[str]:
    return path.lstrip("-").lower().replace("-", "_").split(".")


def _matching_parts(parts: list[str], key: list[str]) -> int:
    """Return the number of parts at the end that agree; 0 if they are too few to mean the same."""
    pairs = list(zip(reversed(parts), reversed(key), strict=False))
    count = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    return 0 if count == 1 and len(key) > 1 and _GENERIC.fullmatch(key[-1]) else count
