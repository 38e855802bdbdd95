"""Which experts the engines chose for each token: arrays [tokens, layers, top_k] that nobody but the trainer reads.

uint8, or uint16 for models of more than 256 experts. The layer axis has every layer of the model in its order; what it
says of layers without experts means nothing. Where the engines do not say (the last token of an answer is never routed,
because nothing follows it), all of a token's places hold the dtype's largest value: the trainer's own router chooses.
That is unambiguous, because the experts of one token differ from one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]


def join(parts: Sequence[RoutedExperts | None], lengths: Sequence[int], like: RoutedExperts) -> RoutedExperts:
    """Put parts of a sequence one after another.

    Args:
        parts: each [its length, layers, top_k]; None where the engines do not say.
        lengths: of each part [tokens].
        like: any array of the same model.

    Returns:
        [sum of lengths, layers, top_k].

    Raises:
        ValueError: a part is of another length or of another model.
    """
    whole = np.full((sum(lengths), *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None:
            if part.shape != (length, *like.shape[1:]) or part.dtype != like.dtype:
                raise ValueError(f"routed experts {part.dtype}{part.shape} where {length} like {like.shape[1:]} belong")
            whole[start : start + length] = part
        start += length
    return whole
