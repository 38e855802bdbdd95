"""What the messages of a policy hold: the catalogue of its tensors, and their bytes one after another.

A tensor costs both ends some Python, and a policy may have tens of thousands of experts. So each sender's experts of a
layer travel as stacks, [experts, ...], one for each of their matrices, and a receiver joins what the senders have.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from primeslurm.wire.decoding import Count

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_ALIGNMENT = 16
LARGEST_TENSOR = 1 << 40
"""Bytes: many times the stack of the experts of a layer, of which the largest have 50 GB. Receivers make room for it"""

Experts = frozenset[int] | None
"""Which experts a receiver holds; None = all."""


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the catalogue, or a stack of one sender's experts."""

    name: str
    """Of a stack, with `{}` where experts have their number."""
    dtype: str
    """As torch names it."""
    shape: tuple[Count, ...]
    sender: Count
    experts: tuple[Count, ...] = ()
    """Of a stack: whose each row is, ascending."""

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.dtype[:40]!r} is no dtype")
        if self.bytes > LARGEST_TENSOR:
            raise ValueError(f"a tensor of {self.bytes} bytes")
        before, mark, after = self.name.partition("{}")
        named = not set("{}") & set(before + after) and bool(mark) == bool(self.experts)
        if not named or (self.experts and self.shape[:1] != (len(self.experts),)):
            raise ValueError(f"{len(self.experts)} experts in {self.name[:80]!r} {self.shape[:4]}")

    @property
    def bytes(self) -> int:
        """Return its size [bytes]."""
        return int(getattr(torch, self.dtype).itemsize) * math.prod(self.shape)


Catalogue = list[list[TensorInfo]]
"""By layer. The layers' order is the order of sending."""


class Piece(NamedTuple):
    """What a message holds of a tensor: all of it, or some rows of a stack."""

    whole: TensorInfo
    rows: tuple[int, ...] = ()

    @property
    def experts(self) -> tuple[int, ...]:
        """Return the expert of each row."""
        return tuple(self.whole.experts[row] for row in self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape in the message."""
        return (len(self.rows), *self.whole.shape[1:]) if self.rows else self.whole.shape

    @property
    def bytes(self) -> int:
        """Return its size without alignment [bytes]."""
        return self.whole.bytes * len(self.rows) // len(self.whole.experts) if self.rows else self.whole.bytes

    @property
    def room(self) -> int:
        """Return its size in a message [bytes], rounded up so that the next tensor starts aligned."""
        return -(-self.bytes // _ALIGNMENT) * _ALIGNMENT


Message = tuple[Piece, ...]


class Named(NamedTuple):
    """A tensor, or a stack of experts, as TensorInfo describes it."""

    name: str
    tensor: torch.Tensor
    experts: tuple[int, ...] = ()

    def each(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over every tensor in it, under its own name."""
        if not self.experts:
            return iter([(self.name, self.tensor)])
        names = (self.name.format(expert) for expert in self.experts)
        return zip(names, self.tensor.unbind(), strict=True)


def stacked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Named]:
    """Put the experts of a layer into stacks.

    Args:
        tensors: of the layer, by name, those of experts one by one.

    Yields:
        Its other tensors as they are, then the stacks.
    """
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors:
        if found := _EXPERT.search(name):
            experts.setdefault(f"{name[: found.start()]}{{}}{name[found.end() :]}", {})[int(found[0])] = tensor
        else:
            yield Named(name, tensor)
    for name, rows in experts.items():
        order = tuple(sorted(rows))
        yield Named(name, torch.stack([rows[expert] for expert in order]), order)


def outgoing(layer: Sequence[TensorInfo], sender: int, experts: Experts) -> list[Message]:
    """List the messages of a layer from one sender to one receiver.

    Args:
        layer: of the catalogue.
        sender: rank of the sender.
        experts: those that the receiver holds.

    Returns:
        What every receiver gets, then what only this one's experts need; messages without content are left out.
    """
    mine = [info for info in layer if info.sender == sender]
    common = tuple(Piece(info) for info in mine if not info.experts)
    stacks = ((info, _held(info, experts)) for info in mine if info.experts)
    own = tuple(Piece(info, rows) for info, rows in stacks if rows)
    return [message for message in (common, own) if message]


def pack(message: Message, tensors: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Copy the bytes of a message out of a sender's whole tensors and stacks.

    Args:
        message: says what, and in which order.
        tensors: by the names of the catalogue.
        device: of the result.

    Returns:
        uint8, as long as `buffer` makes it.
    """
    data = buffer(message, device)
    for piece, place in _places(message, data):
        source = tensors[piece.whole.name]
        if not piece.rows:
            place.copy_(source)
        for start, rows in _runs(piece.rows):
            part = source[rows]
            place[start : start + len(part)].copy_(part)
    return data


def buffer(message: Message, device: torch.device) -> torch.Tensor:
    """Make room for the bytes of a message: uint8, uninitialised."""
    return torch.empty(sum(piece.room for piece in message), dtype=torch.uint8, device=device)


def unpack(messages: Iterable[tuple[Message, torch.Tensor]]) -> list[Named]:
    """Take a layer's tensors out of its messages from all senders.

    Returns:
        Views of the messages where possible; stacks hold all experts that have come, ascending.
    """
    found: list[Named] = []
    stacks: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
    for message, data in messages:
        for piece, place in _places(message, data):
            if piece.rows:
                stacks.setdefault(piece.whole.name, []).append((piece, place))
            else:
                found.append(Named(piece.whole.name, place))
    return found + [_joined(name, pieces) for name, pieces in stacks.items()]


def _joined(name: str, pieces: list[tuple[Piece, torch.Tensor]]) -> Named:
    if len(pieces) == 1:
        piece, stack = pieces[0]
        return Named(name, stack, piece.experts)
    rows = {expert: row for piece, stack in pieces for expert, row in zip(piece.experts, stack.unbind(), strict=True)}
    experts = tuple(sorted(rows))
    return Named(name, torch.stack([rows[expert] for expert in experts]), experts)


def _places(message: Message, data: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    start = 0
    for piece in message:
        yield piece, data[start : start + piece.bytes].view(getattr(torch, piece.whole.dtype)).view(piece.shape)
        start += piece.room


def _held(info: TensorInfo, experts: Experts) -> tuple[int, ...]:
    """The rows of a stack that a receiver needs."""
    return tuple(row for row, expert in enumerate(info.experts) if experts is None or expert in experts)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Rows of a stack as slices of it, each with its place among the rows: copies are made by slice."""
    for _, run in itertools.groupby(enumerate(rows), key=lambda place: place[1] - place[0]):
        places = list(run)
        yield places[0][0], slice(places[0][1], places[-1][1] + 1)
