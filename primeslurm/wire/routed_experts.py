"""Which experts the engines chose for each token: arrays [tokens, layers, top_k] that nobody but the trainer reads.

uint8, or uint16 for models of more than 256 experts. The layer axis has every layer of the model in its order; what it
says of layers without experts means nothing. Where the engines do not say (the last token of an answer is never routed,
because nothing follows it), all of a token's places hold the dtype's largest value: the trainer's own router chooses.
That is unambiguous, because the experts of one token differ from one another.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primeslurm.wire.received import LARGEST_AXIS, DamagedError

RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]

_NPY = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|[\x02\x03]\x00....)"
    rb"\{'descr': '([<|]u[12])', 'fortran_order': (False|True), 'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n",
    re.DOTALL,
)
"""A .npy file as numpy writes it. numpy itself evaluates its header, and makes room for whatever shape that names."""


def from_npy(text: str, tokens: int) -> RoutedExperts:
    """Read an array of so many tokens from a .npy file in base64, which is how engines send it.

    Raises:
        DamagedError: it is none, or of another shape.
    """
    try:
        data = binascii.a2b_base64(text)
    except ValueError as error:
        raise DamagedError(f"routed experts that are no base64: {error}") from error
    if (found := _NPY.match(data)) is None:
        raise DamagedError("routed experts that are no array of three axes, of one or two bytes each")
    shape, order = tuple(map(int, found.groups()[2:])), "F" if found[2] == b"True" else "C"
    if shape[0] != tokens:
        raise DamagedError(f"routed experts of {shape[0]} tokens instead of {tokens}")
    dtype, size = np.dtype(found[1].decode()), len(data) - found.end()
    if not all(0 < axis <= LARGEST_AXIS for axis in shape[1:]) or size != np.prod(shape, dtype=object) * dtype.itemsize:
        raise DamagedError(f"routed experts {dtype}{shape} in {size} bytes")
    whole: RoutedExperts = np.frombuffer(data, dtype, offset=found.end()).reshape(shape, order=order)  # type: ignore[call-overload]
    return whole


def join(parts: Sequence[RoutedExperts | None], lengths: Sequence[int], like: RoutedExperts) -> RoutedExperts:
    """Put parts of a sequence one after another.

    Args:
        parts: each [its length, layers, top_k]; None where the engines do not say.
        lengths: of each part [tokens].
        like: any array of the same model.

    Returns:
        [sum of lengths, layers, top_k].

    Raises:
        DamagedError: a part is of another length or of another model.
    """
    whole = np.full((sum(lengths), *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None:
            if part.shape != (length, *like.shape[1:]) or part.dtype != like.dtype:
                raise DamagedError(
                    f"routed experts {part.dtype}{part.shape} where {length} like {like.shape[1:]} belong"
                )
            whole[start : start + length] = part
        start += length
    return whole
