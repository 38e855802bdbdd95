"""The catalogue of a policy's tensors, and the messages that carry their bytes.

Each tensor costs both ends some Python time, and a policy may have tens of thousands of expert matrices. Therefore each
sender stacks its experts of a layer, one stack [experts, ...] per matrix, and a receiver joins the senders' stacks.
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
# Maximum size of a tensor [bytes], because receivers allocate it. The largest stacks of a layer have 50 GB.
LARGEST_TENSOR = 1 << 40

Experts = frozenset[int] | None  # the experts that a receiver holds; None: all


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the catalogue, or a stack of one sender's experts."""

    name: str  # Name in Hugging Face format. A stack has `{}` in place of the expert's number.
    dtype: str  # torch's name of the dtype
    shape: tuple[Count, ...]
    sender: Count
    experts: tuple[Count, ...] = ()  # expert of each row of a stack, ascending

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.dtype[:40]!r} is no dtype")
        if self.bytes > LARGEST_TENSOR:
            raise ValueError(f"a tensor of {self.bytes} bytes")
        before, mark, after = self.name.partition("{}")
        well_named = not set("{}") & set(before + after) and bool(mark) == bool(self.experts)
        if not well_named or (self.experts and self.shape[:1] != (len(self.experts),)):
            raise ValueError(f"{len(self.experts)} experts in {self.name[:80]!r} {self.shape[:4]}")

    @property
    def bytes(self) -> int:
        return int(getattr(torch, self.dtype).itemsize) * math.prod(self.shape)


Catalogue = list[list[TensorInfo]]  # tensors by layer, in the order of sending


class TensorSlice(NamedTuple):
    """A whole tensor, or some rows of a stack, in a message."""

    whole: TensorInfo
    rows: tuple[int, ...] = ()

    @property
    def experts(self) -> tuple[int, ...]:
        return tuple(self.whole.experts[row] for row in self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.whole.shape[1:]) if self.rows else self.whole.shape

    @property
    def bytes(self) -> int:
        return self.whole.bytes * len(self.rows) // len(self.whole.experts) if self.rows else self.whole.bytes

    @property
    def aligned_bytes(self) -> int:
        """Return the size in the message [bytes], rounded up so that the next tensor starts aligned."""
        return -(-self.bytes // _ALIGNMENT) * _ALIGNMENT


Message = tuple[TensorSlice, ...]


class Named(NamedTuple):
    """A received or outgoing tensor, or a stack of experts, with its name as in TensorInfo."""

    name: str
    tensor: torch.Tensor
    experts: tuple[int, ...] = ()

    def each(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors. A stack yields each expert's matrix under that expert's name."""
        if not self.experts:
            return iter([(self.name, self.tensor)])
        names = (self.name.format(expert) for expert in self.experts)
        return zip(names, self.tensor.unbind(), strict=True)


def stacked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Named]:
    """Stack the experts among a layer's named tensors. Yield the other tensors first, then the stacks."""
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors:
        if match := _EXPERT.search(name):
            experts.setdefault(f"{name[: match.start()]}{{}}{name[match.end() :]}", {})[int(match[0])] = tensor
        else:
            yield Named(name, tensor)
    for name, rows in experts.items():
        order = tuple(sorted(rows))
        yield Named(name, torch.stack([rows[expert] for expert in order]), order)


def outgoing(layer: Sequence[TensorInfo], sender: int, experts: Experts) -> list[Message]:
    """Return the messages of a layer from one sender to a receiver that holds `experts`.

    The first message is equal for all receivers, so a sender packs it once. The second has this receiver's experts.
    Empty messages are left out.
    """
    mine = [info for info in layer if info.sender == sender]
    common = tuple(TensorSlice(info) for info in mine if not info.experts)
    stacks = ((info, _needed_rows(info, experts)) for info in mine if info.experts)
    selected = tuple(TensorSlice(info, rows) for info, rows in stacks if rows)
    return [message for message in (common, selected) if message]


def pack(message: Message, tensors: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Copy the slices of a message from `tensors`, by catalogue name, into one uint8 tensor on `device`."""
    data = buffer(message, device)
    for piece, view in _views(message, data):
        source = tensors[piece.whole.name]
        if not piece.rows:
            view.copy_(source)
        for start, rows in _runs(piece.rows):
            block = source[rows]
            view[start : start + len(block)].copy_(block)
    return data


def buffer(message: Message, device: torch.device) -> torch.Tensor:
    return torch.empty(sum(piece.aligned_bytes for piece in message), dtype=torch.uint8, device=device)


def unpack(messages: Iterable[tuple[Message, torch.Tensor]]) -> list[Named]:
    """Return a layer's tensors from its messages of all senders.

    Tensors are views of the messages where possible. Stacks hold all experts that have arrived, ascending.
    """
    tensors: list[Named] = []
    stacks: dict[str, list[tuple[TensorSlice, torch.Tensor]]] = {}
    for message, data in messages:
        for piece, view in _views(message, data):
            if piece.rows:
                stacks.setdefault(piece.whole.name, []).append((piece, view))
            else:
                tensors.append(Named(piece.whole.name, view))
    return tensors + [_joined(name, slices) for name, slices in stacks.items()]


def _joined(name: str, slices: list[tuple[TensorSlice, torch.Tensor]]) -> Named:
    if len(slices) == 1:
        piece, stack = slices[0]
        return Named(name, stack, piece.experts)
    rows = {expert: row for piece, stack in slices for expert, row in zip(piece.experts, stack.unbind(), strict=True)}
    experts = tuple(sorted(rows))
    return Named(name, torch.stack([rows[expert] for expert in experts]), experts)


def _views(message: Message, data: torch.Tensor) -> Iterator[tuple[TensorSlice, torch.Tensor]]:
    start = 0
    for piece in message:
        yield piece, data[start : start + piece.bytes].view(getattr(torch, piece.whole.dtype)).view(piece.shape)
        start += piece.aligned_bytes


def _needed_rows(info: TensorInfo, experts: Experts) -> tuple[int, ...]:
    return tuple(row for row, expert in enumerate(info.experts) if experts is None or expert in experts)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield runs of consecutive rows, each with its index among `rows`, because copying by slices is faster."""
    for _, run in itertools.groupby(enumerate(rows), key=lambda place: place[1] - place[0]):
        places = list(run)
        yield places[0][0], slice(places[0][1], places[-1][1] + 1)
