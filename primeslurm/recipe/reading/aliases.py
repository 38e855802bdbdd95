"""Find what a key or a value of another tool is called in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator

from primeslurm.recipe.reading.alias_table import ALIASES, VALUE_ALIASES, Alias, Tool, ValueAlias

_GENERIC = re.compile(
    "algo|alpha|beta|container|cpu|data|delta|dtype|enable|env|error|export|format|freq|function|id|interval|load|logger"
    "|mem|mode|model|modules?|n|name|nodes|optim|output|path|policy|port|rank|ratio|runtime|sampling|save|signal|source"
    "|step|time|timeout|tools|type"
)
"""Words that mean too much alone: the section above must agree, too, unless the key is alone in its tool."""


def keys_of(tool: Tool) -> Iterator[tuple[str, Alias]]:
    """List the keys of one tool with their entries, in the order of a recipe's sections."""
    for alias in ALIASES:
        for key in alias.keys.get(tool, ()):
            yield key, alias


def find_alias(path: str, least: int = 1) -> Alias | None:
    """Find what a key that no recipe has means in another tool.

    Args:
        path: the key as the user wrote it, with dots between sections; only its end must agree.
        least: parts at the end that must agree.
    """
    parts = _normal(path)
    best: tuple[int, Alias] | None = None
    for alias in ALIASES:
        for keys in alias.keys.values():
            for key in keys:
                agree = _agreement(parts, _normal(key))
                if agree > (best[0] if best else least - 1) and alias.field != path:
                    best = agree, alias
    return best[1] if best else None


def find_value(field: str, value: str) -> ValueAlias | None:
    """Find what a value that a choice does not have is called here. `field`: without numbers of list entries."""
    word = value.strip().lower()
    return next((each for each in VALUE_ALIASES if each.field == field and word in each.theirs), None)


def _normal(path: str) -> list[str]:
    return path.lstrip("-").lower().replace("-", "_").split(".")


def _agreement(parts: list[str], key: list[str]) -> int:
    """Count the parts at the end that agree; 0 if these are too few to mean the same."""
    count = 0
    for ours, theirs in zip(reversed(parts), reversed(key), strict=False):
        if ours != theirs:
            break
        count += 1
    return 0 if count == 1 and len(key) > 1 and _GENERIC.fullmatch(key[-1]) else count
