"""Arrays that come in from other processes: what their reader was promised, or refused with a DamagedError.

No length that a message states is believed: memory follows from the bytes that are there. And nothing counts with the
arrays of a rollout or a batch before their names, dtypes and shapes were looked at: a trainer that is given a token
below 0, or an array of another length, does not refuse it. It dies, or learns nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from primeslurm.wire.decoding import DamagedError, Size

MOST_AXES = 8
"""Of an array; the most that anything here has is 3: [tokens, layers, top_k]."""
LARGEST_AXIS = 1024
"""Layers of a model, and choices of a layer: many times what any has. What follows from them is allocated."""

_KINDS = {
    **dict.fromkeys(("token_ids", "positions", "versions"), ("i4",)),
    **dict.fromkeys(("mask", "on_policy", "observed"), ("b1",)),
    **dict.fromkeys(("logprobs", "advantages", "temperatures", "echo_weights", "ref_logprobs"), ("f4",)),
    "routed_experts": ("u1", "u2"),
}
"""The dtypes that each array may have."""
_LEAST = {"token_ids": 0, "positions": 0, "versions": -1}


class ArraySpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one buffer."""

    name: str
    dtype: Annotated[str, msgspec.Meta(pattern=r"^[<|][biuf][1248]$")]
    """Numbers alone, as numpy writes them: nothing that is parsed any further, and no objects."""
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MOST_AXES)]


def array(spec: ArraySpec, frame: Any) -> NDArray[Any]:
    """Make an array of a buffer, without a copy.

    Raises:
        DamagedError: the buffer is not what it is said to be.
    """
    raw, name = np.frombuffer(frame, np.uint8), spec.name[:40]
    try:
        dtype = np.dtype(spec.dtype)
        fits = len(raw) == math.prod(spec.shape) * dtype.itemsize
        found = raw.view(dtype).reshape(spec.shape) if fits else None
    except (TypeError, ValueError) as error:  # no dtype after all, or more places than numpy can count
        raise DamagedError(f"{name!r}: {error}") from error
    if found is None:
        raise DamagedError(f"{len(raw)} bytes for {name!r}, {spec.dtype}{list(spec.shape)}")
    if dtype.kind == "b" and raw.max(initial=0) > 1:
        raise DamagedError(f"{name!r} has booleans that are neither")
    return found


def mismatch(kind: type[Any], arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], without: str = "") -> str:
    """Compare arrays with the fields of a dataclass.

    Args:
        kind: has one field for each array; what has no default is needed.
        arrays: by name.
        shape: of each; routed experts have two axes more.
        without: an array of it that is not among these.

    Returns:
        What does not belong there, in words; "" if everything does.
    """
    known = {spec.name: spec.default is MISSING for spec in fields(kind) if spec.name in _KINDS.keys() - {without}}
    if strange := arrays.keys() - known.keys():
        return f"arrays {sorted(name[:40] for name in strange)[:4]}, which it has not"
    if missing := {name for name, needed in known.items() if needed} - arrays.keys():
        return f"no {', '.join(sorted(missing))}"
    for name, found in arrays.items():
        axes = found.shape[len(shape) :]
        fits = found.dtype.str[1:] in _KINDS[name] and found.shape[: len(shape)] == shape
        if not fits or len(axes) != (2 if name == "routed_experts" else 0) or not _countable(axes):
            return f"{name} of {found.dtype}{list(found.shape)}, where {_KINDS[name][0]}{list(shape)} belong"
        if name in _LEAST and found.min() < _LEAST[name]:
            return f"{name} below {_LEAST[name]}"
    return ""


def _countable(axes: tuple[int, ...]) -> bool:
    return all(0 < axis <= LARGEST_AXIS for axis in axes)
