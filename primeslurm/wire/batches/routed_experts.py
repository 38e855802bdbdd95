"""Which experts the engines chose for each token: arrays [tokens, layers, top_k] that nobody but the trainer reads.

uint8, or uint16 for models of more than 256 experts. The layer axis has every layer of the model in its order; what it
says of layers without experts means nothing. Where the engines do not say (the last token of an answer is never routed,
because nothing follows it), all of a token's places hold the dtype's largest value: the trainer's own router chooses.
That is unambiguous, because the experts of one token differ from one another. Engines can break this rule: vLLM keeps
choices in slots of zeros, so a token that it never recorded comes back as expert 0 in every place. `without_repeats`
makes such tokens unknown. A trainer that sent a token to one expert twice would compute wrong outputs for other tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from primeslurm.wire.batches.array_checks import LARGEST_AXIS
from primeslurm.wire.decoding import DamagedError

RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]

_NPY = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|[\x02\x03]\x00....)"
    rb"\{'descr': '([<|]u[12])', 'fortran_order': (False|True), 'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n",
    re.DOTALL,
)
"""A .npy file as numpy writes it. numpy itself evaluates its header, and makes room for whatever shape that names."""


_HEADER = 1 << 10
"""Characters of base64 that a .npy file's header is in; numpy's has 128 bytes. A multiple of 4, as is _CHUNK."""
_CHUNK = 1 << 20
"""Characters that are decoded at once: few enough that what comes of them is copied out of the processor's cache."""
_CACHED = 1 << 18
"""Bytes of experts that are compared at once, few enough for the processor's cache."""


def from_npy(text: bytes | memoryview, tokens: int, unknown: int = 0) -> RoutedExperts:
    """Read an array of so many tokens from a .npy file in base64, which is how engines send it.

    Args:
        text: of the file.
        tokens: that it must have.
        unknown: so many tokens follow in what is returned, of which the engine does not say.

    Returns:
        [tokens + unknown, layers, top_k].

    Raises:
        DamagedError: it is none, or of another shape.
    """
    data = memoryview(text)
    head = _decoded(data[:_HEADER])
    if (found := _NPY.match(head)) is None:
        raise DamagedError("routed experts that are no array of three axes, of one or two bytes each")
    shape, fortran = tuple(map(int, found.groups()[2:])), found[2] == b"True"
    if shape[0] != tokens:
        raise DamagedError(f"routed experts of {shape[0]} tokens instead of {tokens}")
    dtype, size = np.dtype(found[1].decode()), len(data) // 4 * 3 - bytes(data[-2:]).count(b"=") - found.end()
    if not all(0 < axis <= LARGEST_AXIS for axis in shape[1:]) or size != np.prod(shape, dtype=object) * dtype.itemsize:
        raise DamagedError(f"routed experts {dtype}{shape} in {size} bytes")
    whole: RoutedExperts = np.empty((tokens + unknown, *shape[1:]), dtype)
    whole[tokens:] = np.iinfo(dtype).max
    flat = np.empty(size, np.uint8) if fortran else whole[:tokens].reshape(-1).view(np.uint8)
    _decode_into(flat.data, head[found.end() :], data[_HEADER:])
    if fortran:
        whole[:tokens] = flat.view(dtype).reshape(shape, order="F")
    return whole


def characters(text: memoryview) -> int:
    """Tell how many characters of base64 a .npy file has that begins so; 0 if it is none. Nothing is looked at twice.

    It is what the file says of itself: `from_npy` finds out whether that is true.
    """
    try:
        found = _NPY.match(_decoded(text[:_HEADER]))
    except DamagedError:  # or shorter than that
        return 0
    if found is None:
        return 0
    size = found.end() + math.prod(map(int, found.groups()[2:])) * int(found[1][2:])
    return -(-size // 3) * 4


def without_repeats(routed: RoutedExperts, layers: Sequence[int], count: int) -> tuple[RoutedExperts, int]:
    """Make every token unknown whose experts repeat in a layer.

    Args:
        routed: [tokens, layers, top_k].
        layers: indices of the layers that have experts; other layers mean nothing.
        count: experts of a layer.

    Returns:
        The same array if no token changes, else a copy. The number of tokens that became unknown.

    Raises:
        DamagedError: a token that is known has an expert beyond `count`.
    """
    repeats, beyond = np.zeros(len(routed), np.bool_), np.zeros(len(routed), np.bool_)
    # 75 layers of 8 experts have 28 pairs each to compare. By place, each comparison is one of contiguous bytes.
    step = max(1, _CACHED // max(1, routed[:1].nbytes))
    for start in range(0, len(routed), step):
        places = np.ascontiguousarray(routed[start : start + step].transpose(2, 0, 1))
        same = np.zeros(places.shape[1:], np.bool_)
        for one, other in combinations(places, 2):
            same |= one == other
        repeats[start : start + step] = same[:, layers].any(axis=1)
        beyond[start : start + step] = (places.max(axis=0)[:, layers] >= count).any(axis=1)
    unknown = np.iinfo(routed.dtype).max
    suspects = np.flatnonzero(repeats | beyond)
    suspects = suspects[(routed[suspects] != unknown).any(axis=(1, 2))]
    if not repeats[suspects].all():
        raise DamagedError(f"routed experts beyond the {count} that there are")
    if len(suspects):
        routed = routed.copy()
        routed[suspects] = unknown
    return routed, len(suspects)


def _decode_into(into: memoryview, first: bytes, rest: memoryview) -> None:
    """Fill a buffer with bytes, and with what base64 says follows them."""
    pieces = (_decoded(rest[start : start + _CHUNK]) for start in range(0, len(rest), _CHUNK))
    end = 0
    for piece in chain([first], pieces):
        start, end = end, end + len(piece)
        if end > len(into):
            break
        into[start:end] = piece
    if end != len(into):
        raise DamagedError(f"routed experts with padding within, or in {end} bytes instead of {len(into)}")


def _decoded(text: memoryview) -> bytes:
    import pybase64  # not above: who submits a run reads none

    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise DamagedError(f"routed experts that are no base64: {error}") from error


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
    whole = np.empty((sum(lengths), *like.shape[1:]), like.dtype)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None and (part.shape != (length, *like.shape[1:]) or part.dtype != like.dtype):
            raise DamagedError(f"routed experts {part.dtype}{part.shape} where {length} like {like.shape[1:]} belong")
        whole[start : start + length] = np.iinfo(like.dtype).max if part is None else part
        start += length
    return whole
