"""Checks of arrays from other processes against the dataclass that they fill.

A trainer that gets a negative token or an array of another length does not refuse it: it crashes, or learns nonsense.
Therefore names, dtypes and shapes are checked before anything computes with the arrays of a rollout or a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from numpy.typing import NDArray

MAX_AXIS = 1024  # maximum number of layers of a model and of choices per layer, because memory is allocated by them

_DTYPES = {
    **dict.fromkeys(("token_ids", "positions", "versions"), ("i4",)),
    **dict.fromkeys(("mask", "on_policy", "observed"), ("b1",)),
    **dict.fromkeys(("logprobs", "advantages", "temperatures", "echo_weights", "ref_logprobs"), ("f4",)),
    "routed_experts": ("u1", "u2"),
}
_MINIMA = {"token_ids": 0, "positions": 0, "versions": -1}


def mismatch(kind: type[Any], arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], without: str = "") -> str:
    """Compare named arrays with the fields of a dataclass.

    Args:
        kind: Dataclass with one field per array. Fields without a default are required.
        shape: Shape of each array; routed experts have two more axes.
        without: Name of a field whose array is not expected.

    Returns:
        The first problem, or "" if there is none.
    """
    names = _DTYPES.keys() - {without}
    required = {spec.name: spec.default is MISSING for spec in fields(kind) if spec.name in names}
    if unknown := arrays.keys() - required.keys():
        return f"unknown arrays {sorted(name[:40] for name in unknown)[:4]}"
    if missing := {name for name, needed in required.items() if needed} - arrays.keys():
        return f"no {', '.join(sorted(missing))}"
    for name, array in arrays.items():
        axes = array.shape[len(shape) :]
        fits = array.dtype.str[1:] in _DTYPES[name] and array.shape[: len(shape)] == shape
        expected_axes = 2 if name == "routed_experts" else 0
        if not fits or len(axes) != expected_axes or not all(0 < axis <= MAX_AXIS for axis in axes):
            return f"{name} is {array.dtype}{list(array.shape)} instead of {_DTYPES[name][0]}{list(shape)}"
        if name in _MINIMA and array.min() < _MINIMA[name]:
            return f"{name} below {_MINIMA[name]}"
    return ""
