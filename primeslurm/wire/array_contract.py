"""What the arrays of rollouts and batches have to be before anything counts with them: names, dtypes and shapes.

A trainer that is given a token below 0, or an array of another length, does not refuse it: it dies, or learns nonsense.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from primeslurm.wire.frames import Arrays

_KINDS = {
    **dict.fromkeys(("token_ids", "positions", "versions"), ("i4",)),
    **dict.fromkeys(("mask", "on_policy", "observed"), ("b1",)),
    **dict.fromkeys(("logprobs", "advantages", "temperatures", "echo_weights", "ref_logprobs"), ("f4",)),
    "routed_experts": ("u1", "u2"),
}
"""The dtypes that each array may have."""
_LEAST = {"token_ids": 0, "positions": 0, "versions": -1}
LARGEST_AXIS = 1024
"""Layers of a model, and choices of a layer: many times what any has. What follows from them is allocated."""


def mismatch(kind: type[Any], arrays: Arrays, shape: tuple[int, ...]) -> str:
    """Compare arrays with the fields of a dataclass.

    Args:
        kind: has one field for each array; what has no default is needed.
        arrays: by name.
        shape: of each; routed experts have two axes more.

    Returns:
        What does not belong there, in words; "" if everything does.
    """
    known = {spec.name: spec.default is MISSING for spec in fields(kind) if spec.name in _KINDS}
    if strange := arrays.keys() - known.keys():
        return f"arrays {sorted(name[:40] for name in strange)[:4]}, which it has not"
    if missing := {name for name, needed in known.items() if needed} - arrays.keys():
        return f"no {', '.join(sorted(missing))}"
    for name, array in arrays.items():
        axes = array.shape[len(shape) :]
        fits = array.dtype.str[1:] in _KINDS[name] and array.shape[: len(shape)] == shape
        if not fits or len(axes) != (2 if name == "routed_experts" else 0) or not _countable(axes):
            return f"{name} of {array.dtype}{list(array.shape)}, where {_KINDS[name][0]}{list(shape)} belong"
        if name in _LEAST and array.min() < _LEAST[name]:
            return f"{name} below {_LEAST[name]}"
    return ""


def _countable(axes: tuple[int, ...]) -> bool:
    return all(0 < axis <= LARGEST_AXIS for axis in axes)
