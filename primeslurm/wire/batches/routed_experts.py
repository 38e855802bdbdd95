"""Experts that the engines chose for each token: arrays [tokens, layers, top_k], which only the trainer reads.

The dtype is uint8, or uint16 for models with more than 256 experts. The layer axis has every layer of the model in
order; entries of layers without experts have no meaning. If the engines do not report a token's experts (the last token
of an answer is never routed, because nothing follows it), all its entries are the dtype's largest value, and the
trainer's own router chooses. That is unambiguous because a token's experts differ. Engines can break this rule: vLLM
keeps choices in slots of zeros, so a token that it never recorded has expert 0 everywhere. `without_repeats` marks such
tokens as unknown, because a trainer that sent a token to one expert twice would corrupt the output of other tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from primeslurm.wire.batches.frames import MAX_AXIS
from primeslurm.wire.decoding import DamagedError

RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]

# Header of a .npy file. numpy's own reader would evaluate it as Python and allocate whatever shape it names.
_NPY = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|[\x02\x03]\x00....)"
    rb"\{'descr': '([<|]u[12])', 'fortran_order': (False|True), 'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n",
    re.DOTALL,
)
# Characters of base64 that contain the header, which has 128 bytes. A multiple of 4, as is _DECODE_CHARS.
_HEADER_CHARS = 1 << 10
_DECODE_CHARS = 1 << 20  # characters that are decoded at once, so few that the result is copied from the CPU's cache
_CACHED_BYTES = 1 << 18  # bytes of experts that are compared at once, so few that they fit into the CPU's cache


def from_npy(text: bytes | memoryview, tokens: int, unknown: int = 0) -> RoutedExperts:
    """Decode a .npy file in base64, which is what engines send, to [tokens + unknown, layers, top_k].

    Raises DamagedError if the text is invalid or has another shape.
    """
    data = memoryview(text)
    head = _decoded(data[:_HEADER_CHARS])
    if (match := _NPY.match(head)) is None:
        raise DamagedError("routed experts are not an array with three axes of one or two bytes each")
    shape, fortran = tuple(map(int, match.groups()[2:])), match[2] == b"True"
    if shape[0] != tokens:
        raise DamagedError(f"routed experts of {shape[0]} tokens instead of {tokens}")
    dtype, size = np.dtype(match[1].decode()), len(data) // 4 * 3 - bytes(data[-2:]).count(b"=") - match.end()
    if not all(0 < axis <= MAX_AXIS for axis in shape[1:]) or size != np.prod(shape, dtype=object) * dtype.itemsize:
        raise DamagedError(f"routed experts {dtype}{shape} in {size} bytes")
    experts: RoutedExperts = np.empty((tokens + unknown, *shape[1:]), dtype)
    experts[tokens:] = np.iinfo(dtype).max
    flat = np.empty(size, np.uint8) if fortran else experts[:tokens].reshape(-1).view(np.uint8)
    _decode_into(flat.data, head[match.end() :], data[_HEADER_CHARS:])
    if fortran:
        experts[:tokens] = flat.view(dtype).reshape(shape, order="F")
    return experts


def characters(text: memoryview) -> int:
    """Return the length in base64 that the header of a .npy file announces; 0 if `text` does not begin with one."""
    try:
        match = _NPY.match(_decoded(text[:_HEADER_CHARS]))
    except DamagedError:
        return 0
    if match is None:
        return 0
    size = match.end() + math.prod(map(int, match.groups()[2:])) * int(match[1][2:])
    return -(-size // 3) * 4


def without_repeats(routed: RoutedExperts, layers: Sequence[int], count: int) -> tuple[RoutedExperts, int]:
    """Mark every token as unknown whose experts repeat in a layer, and return how many tokens changed.

    The array is copied if a token changes. Raises DamagedError if a known token has an expert that does not exist.
    """
    repeats, beyond = np.zeros(len(routed), np.bool_), np.zeros(len(routed), np.bool_)
    # 8 experts have 28 pairs to compare in each layer. With top_k as the first axis, each comparison reads contiguous
    # bytes.
    step = max(1, _CACHED_BYTES // max(1, routed[:1].nbytes))
    for start in range(0, len(routed), step):
        choices = np.ascontiguousarray(routed[start : start + step].transpose(2, 0, 1))
        same = np.zeros(choices.shape[1:], np.bool_)
        for one, other in combinations(choices, 2):
            same |= one == other
        repeats[start : start + step] = same[:, layers].any(axis=1)
        beyond[start : start + step] = (choices.max(axis=0)[:, layers] >= count).any(axis=1)
    unknown = np.iinfo(routed.dtype).max
    suspects = np.flatnonzero(repeats | beyond)
    suspects = suspects[(routed[suspects] != unknown).any(axis=(1, 2))]
    if not repeats[suspects].all():
        raise DamagedError(f"routed experts beyond the {count} of a layer")
    if len(suspects):
        routed = routed.copy()
        routed[suspects] = unknown
    return routed, len(suspects)


def count_unknown(routed: RoutedExperts) -> int:
    """Return the number of tokens with unknown experts, without the last one, which is never routed."""
    unknown = np.iinfo(routed.dtype).max
    # Some models have an expert 255: in unknown tokens, all entries are. Few known tokens pass the first comparison.
    suspects = np.flatnonzero(routed[:-1, -1, 0] == unknown)
    return int((routed[suspects] == unknown).all(axis=(1, 2)).sum())


def _decode_into(buffer: memoryview, first: bytes, rest: memoryview) -> None:
    blocks = (_decoded(rest[start : start + _DECODE_CHARS]) for start in range(0, len(rest), _DECODE_CHARS))
    end = 0
    for block in chain([first], blocks):
        start, end = end, end + len(block)
        if end > len(buffer):
            break
        buffer[start:end] = block
    if end != len(buffer):
        raise DamagedError(f"routed experts with padding inside, or with {end} bytes instead of {len(buffer)}")


def _decoded(text: memoryview) -> bytes:
    import pybase64  # here, because the process that submits a run imports this module and decodes nothing

    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise DamagedError(f"routed experts in invalid base64: {error}") from error


def join(parts: Sequence[RoutedExperts | None], lengths: Sequence[int], like: RoutedExperts) -> RoutedExperts:
    """Concatenate the experts of the parts of a sequence to [sum of lengths, layers, top_k].

    A part is [length, layers, top_k], or None if its experts are unknown. Raises DamagedError if a part has another
    length or is from another model.
    """
    experts = np.empty((sum(lengths), *like.shape[1:]), like.dtype)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None and (part.shape != (length, *like.shape[1:]) or part.dtype != like.dtype):
            raise DamagedError(f"routed experts {part.dtype}{part.shape} instead of {length} tokens {like.shape[1:]}")
        experts[start : start + length] = np.iinfo(like.dtype).max if part is None else part
        start += length
    return experts
