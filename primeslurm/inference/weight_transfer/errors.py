"""What is wrong with a policy."""

from __future__ import annotations


class PolicyError(RuntimeError):
    """A published policy is incomplete or does not fit the model. The engine must not resume on it."""


def some(names: set[str]) -> str:
    """The first few of many names, for an error."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (" ..." if len(names) > len(shown) else "")
