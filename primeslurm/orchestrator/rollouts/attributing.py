"""Routed experts of a turn, from the engine's answer to the messages of a verifiers trace, as arrays.

verifiers takes them as base64 within JSON, which would have to be made of what is decoded already: 100 MB for 131,072
tokens of 75 layers and 8 experts, encoded and decoded on the event loop of every rollout of a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from verifiers.v1 import graph
from verifiers.v1.trace import Trace

from primeslurm.wire.routed_experts import RoutedExperts

VIEWED = 0.5
"""A message's rows are a view of the turn's if the turn's new messages have this share of them: nothing else, or
little, is kept with them."""


class TurnRows(NamedTuple):
    """What an engine said of a turn, in the place where verifiers has its own of it."""

    rows: RoutedExperts
    """[tokens, layers, top_k]; of its last token nothing is known."""
    start: int
    """Position of the first of its tokens in the sequence."""


posted: ContextVar[list[TurnRows] | None] = ContextVar("posted", default=None)
"""Takes what the turn that is asked for in this context was answered."""


def take_arrays() -> None:
    """Have verifiers take arrays."""
    graph._attribute_routed_experts = _attribute


_attribute_encoded = graph._attribute_routed_experts


def _attribute(trace: Trace, prefix: list[int], new: list[int], path_len: int, payload: Any) -> None:
    """`graph._attribute_routed_experts`: give each message that the turn has added the rows of its own tokens.

    Args:
        trace: of the rollout.
        prefix: its messages that the turn began with, as places among its nodes.
        new: those that the turn has added, the answer last.
        path_len: tokens of the prefix.
        payload: of the turn.
    """
    if not isinstance(payload, TurnRows):
        _attribute_encoded(trace, prefix, new, path_len, payload)
        return
    rows, off = payload.rows, path_len - payload.start
    _know_last(trace, prefix, rows, off)
    viewed = sum(len(trace.nodes[place].token_ids) for place in new) >= VIEWED * len(rows)
    for place in new:
        end = off + len(trace.nodes[place].token_ids)
        if 0 <= off < end <= len(rows):
            trace.nodes[place].routed_experts = rows[off:end] if viewed else rows[off:end].copy()
        off = end


def _know_last(trace: Trace, prefix: Sequence[int], rows: RoutedExperts, off: int) -> None:
    """The last token of an answer is routed when the next turn is computed, whose rows begin with it."""
    last = next((trace.nodes[place] for place in reversed(prefix) if trace.nodes[place].token_ids), None)
    if last is None or not last.sampled or last.routed_experts is None or not 1 <= off <= len(rows):
        return
    known: RoutedExperts = last.routed_experts
    if known.shape[1:] == rows.shape[1:] and known.dtype == rows.dtype and len(known):
        known[-1] = rows[off - 1]
