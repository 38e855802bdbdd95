"""Suggestions for misspelt names and choices."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_CUTOFF = 0.5


def suggestion(given: str, valid: Sequence[str]) -> str:
    """Suggest the nearest choice ("did you mean X?"), or list all choices if none is near."""
    near = nearest(given, valid)
    if near:
        return f"did you mean {near}?"
    return f"valid: {', '.join(sorted(valid))}" if valid else ""


def nearest(given: str, valid: Sequence[str]) -> str:
    """Return the most similar choice; empty if none is similar."""
    return next(iter(difflib.get_close_matches(given, valid, n=1, cutoff=_CUTOFF)), "")


def closest_ready_recipes(name: str, ready: Sequence[str]) -> str:
    """Suggest up to three ready recipes with a similar name, and the command that lists all of them."""
    near = difflib.get_close_matches(name.removesuffix(".yaml"), ready, n=3, cutoff=_CUTOFF)
    return (f"did you mean {', '.join(near)}? " if near else "") + "`primeslurm recipes` lists the ready ones"
