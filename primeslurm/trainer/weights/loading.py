"""Fill the tensors that a rank holds from the files of a model: it reads what it holds, and no more.

The rows of a tensor lie one after the other in its file, so a rank reads its own by their place. Columns do not:
reading them alone touches every page. Ranks that share a matrix by columns read some of its rows each, and exchange
them. So every byte is read once for each copy of the model. FP8 blocks and codes of four bits become numbers where they
are put: on the GPU, if the rank's weights are there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from primeslurm.nn import compat
from primeslurm.nn.block_sizes import FP8_BLOCK
from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.distributed.cpu_affinity import io_threads
from primeslurm.trainer.distributed.world import host_memory
from primeslurm.trainer.weights import four_bits
from primeslurm.trainer.weights.four_bits import FourBits
from primeslurm.trainer.weights.safetensors_header import TensorLocation
from primeslurm.trainer.weights.tensor_files import OpenFiles, TensorFiles
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

PIECE = 8 << 20
"""Bytes that a thread reads at once; what is quantised takes four times as many when it is so no longer."""
SHORT = 64 << 10
"""Runs of fewer bytes are not read one by one: what lies between them is read, too, or other ranks read it."""
Region = tuple[slice, ...]


class RowSlice(NamedTuple):
    """Consecutive rows of a tensor, in one of its slabs: rows are what its dimension number `len(slab)` counts."""

    slab: tuple[int, ...]
    row: int
    rows: int


@dataclass(frozen=True)
class ShardRead:
    """What a rank wants of a tensor."""

    name: str
    place: TensorLocation
    target: torch.Tensor
    """Where it goes, of the region's shape."""
    region: Region
    scaled: bool = False
    """Whether it is stored in FP8 with scales."""
    group: Any = None
    """Who reads it together with this rank, if ranks share it by columns."""
    codes: FourBits | None = None
    """If it is stored in four bits: place, target and region are then as it is stored, with all columns in a row."""

    def pieces(self) -> Iterator[RowSlice]:
        """List what is read of it: by this rank alone, or in four bits by all of its group."""
        if self.codes is None:
            return pieces(self.place, self.region, whole_rows=self.scaled)
        if not self.target.numel() and self.group is None:
            return iter(())
        return pieces(self.place, (*self.region[:-1], slice(0, self.place.shape[-1])))


class Loader:
    """Reads into tensors with several threads.

    Args:
        files: what is read.
        device: where the ranks exchange what they have read.
    """

    def __init__(self, files: TensorFiles, device: torch.device) -> None:
        self._files, self._device = files, device
        self._open = OpenFiles(files)
        self._threads = ThreadPoolExecutor(io_threads(), "loading")
        self._space = threading.local()

    def __enter__(self) -> Loader:
        """Return it: its threads end, and its files are closed, at the end of the body."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads, and close the files."""
        self._threads.shutdown(cancel_futures=True)
        self._open.__exit__()

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, or this rank's shards of them, with what the files hold under their names.

        A collective of those that share matrices by columns: they have the same names in the same order.

        Raises:
            OSError: a file cannot be read.
            ValueError: a tensor has another shape in the files.
        """
        parts = [part_of(self._files, name, tensor) for name, tensor in tensors.items()]
        shared = [(part, self._threads.submit(self._own_rows, part)) for part in parts if part.group and not part.codes]
        coded = [
            (part, part.codes, piece, self._threads.submit(self._own_codes, part, part.codes, piece))
            for part in parts
            if part.group and part.codes
            for piece in part.pieces()
        ]
        alone: list[Future[None]] = [
            self._threads.submit(self._put, part, piece) for part in parts if not part.group for piece in part.pieces()
        ]
        for part, own in shared:
            self._exchange(part, *own.result())
            liveness().heartbeat()
        for part, codes, piece, of_rank in coded:
            self._exchange_codes(part, codes, piece, of_rank.result())
            liveness().heartbeat()
        for done in as_completed(alone):
            done.result()
            liveness().heartbeat()

    @torch.no_grad()
    def _put(self, part: ShardRead, piece: RowSlice) -> None:
        """Read a piece, and put what is wanted of it where it belongs."""
        shape, dimension = part.place.shape, len(piece.slab)
        first, width = _elements(part.place, piece)
        raw = self._open.part(part.name, first, piece.rows * width, self._buffer())
        if not shape:
            part.target.copy_(raw.view(()))
            return
        raw = raw.view(piece.rows, *shape[dimension + 1 :])
        if part.codes:
            row, rows = first // shape[-1], piece.rows * width // shape[-1]
            _put_numbers(part, piece, raw, self._four_bit_scales(part.codes, row, rows))
            return
        raw = raw[(slice(None), *part.region[dimension + 1 :])]
        target = _target(part, piece)
        scales = self._scales(part, piece.row, piece.rows) if part.scaled else None
        target.copy_(_values(part, raw.to(target.device), scales, piece.row))

    def _own_rows(self, part: ShardRead) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read this rank's share of the rows of a matrix, as bytes, filled up to as many as the others have.

        Returns:
            The rows on the device where they are exchanged, and all scales, if there are some.
        """
        rows, columns = part.place.shape
        share = _share(part)
        first = min(rows, dist.get_rank(part.group) * share)
        count = min(share, rows - first)
        filled = torch.empty(share * columns, dtype=part.place.torch_dtype, device=self._device).view(torch.uint8)
        own = self._open.part(part.name, first * columns, count * columns).view(torch.uint8)
        filled[: len(own)].copy_(own)
        return filled, self._scales(part, 0, rows) if part.scaled else None

    @torch.no_grad()
    def _exchange(self, part: ShardRead, own: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Get all rows of a matrix from the ranks that have read them, and keep this rank's columns."""
        whole = own.new_empty(len(own) * dist.get_world_size(part.group))
        dist.all_gather_single(whole, own, group=part.group)
        raw = whole.view(part.place.torch_dtype).view(-1, part.place.shape[1])[part.region]
        part.target.copy_(_values(part, raw, scales, 0))

    def _scales(self, part: ShardRead, row: int, rows: int) -> torch.Tensor:
        """Read the scales of some rows, [blocks, blocks of a row]."""
        name = part.name + FP8_SCALE
        first, last, width = row // FP8_BLOCK, -(-(row + rows) // FP8_BLOCK), self._files.places[name].shape[1]
        return self._open.part(name, first * width, (last - first) * width).view(-1, width)

    def _four_bit_scales(self, codes: FourBits, row: int, rows: int) -> torch.Tensor:
        """Read the scales of some rows, counted through the whole stack, [rows, groups]."""
        groups = codes.scales.shape[-1]
        return self._open.at(codes.scales, row * groups, rows * groups).view(rows, groups)

    def _own_codes(self, part: ShardRead, codes: FourBits, piece: RowSlice) -> torch.Tensor:
        """Read this rank's share of the rows of a piece in four bits, filled up to as many as the others have.

        Returns:
            Bytes on the device where they are exchanged: of each row its codes, then its scales.
        """
        width = part.place.shape[-1]
        row, rows = (number // width for number in _elements(part.place, piece))
        rows *= piece.rows
        share = -(-rows // dist.get_world_size(part.group))
        skipped = min(rows, dist.get_rank(part.group) * share)
        count = min(share, rows - skipped)
        scales = self._four_bit_scales(codes, row + skipped, count).view(torch.uint8)
        filled = torch.empty(share, width + codes.scales.nbytes // math.prod(codes.rows), dtype=torch.uint8)
        filled[:count, :width] = self._open.part(part.name, (row + skipped) * width, count * width).view(-1, width)
        filled[:count, width:] = scales.view(count, filled.shape[1] - width)
        return filled.to(self._device)

    @torch.no_grad()
    def _exchange_codes(self, part: ShardRead, codes: FourBits, piece: RowSlice, own: torch.Tensor) -> None:
        """Get all rows of a piece from the ranks that have read them, and keep this rank's columns."""
        whole = own.new_empty(len(own) * dist.get_world_size(part.group), own.shape[1])
        dist.all_gather_single(whole, own, group=part.group)
        shape, width = part.place.shape, part.place.shape[-1]
        whole = whole[: piece.rows * _elements(part.place, piece)[1] // width]
        raw = whole[:, :width].view(piece.rows, *shape[len(piece.slab) + 1 :])
        _put_numbers(part, piece, raw, whole[:, width:].contiguous().view(codes.scales.torch_dtype))

    def _buffer(self) -> NDArray[np.uint8]:
        """This thread's, used again and again: fresh pages cost more than copying."""
        if not hasattr(self._space, "bytes"):
            self._space.bytes = host_memory(self._device)(PIECE)
        data: NDArray[np.uint8] = self._space.bytes
        return data


def part_of(files: TensorFiles, name: str, tensor: Any) -> ShardRead:
    """Say what this rank wants of a tensor, which may be distributed.

    Raises:
        ValueError: it has another shape in the files, or FP8 blocks that are not of a matrix.
    """
    place, scaled, codes = files.places[name], name + FP8_SCALE in files.places, files.four_bits.get(name)
    stored = codes.shape if codes else place.shape
    if tuple(tensor.shape) != stored:
        there, here = (" x ".join(map(str, shape)) for shape in (stored, tensor.shape))
        raise ValueError(f"{files.directory}: {name} is {there}, and {here} by the model's config")
    if scaled and len(place.shape) != 2:
        raise ValueError(f"{files.directory}: {name} is in FP8 and no matrix: convert it to bfloat16 first")
    spread = isinstance(tensor, DTensor)
    target = (tensor.to_local() if spread else tensor).detach()
    region = compat.local_region(tensor) if spread else tuple(slice(0, length) for length in stored)
    if codes is None:
        return ShardRead(name, place, target, region, scaled, _by_columns(tensor, place) if spread else None)
    group = _sharing_columns(tensor, len(stored) - (2 if codes.turned else 1)) if spread else None
    if codes.turned:
        target, region = target.mT, (*region[:-2], region[-1], region[-2])
    return ShardRead(name, place, target, region, scaled, group, codes)


def _by_columns(tensor: DTensor, place: TensorLocation) -> Any:
    """The group that shares a matrix by columns, each too narrow to be read alone; None if it does not."""
    split = [at for at, kind in enumerate(tensor.placements) if kind.is_shard() and tensor.device_mesh.size(at) > 1]
    if len(place.shape) != 2 or len(split) != 1 or not tensor.placements[split[0]].is_shard(1):
        return None
    return tensor.device_mesh.get_group(split[0])


def _sharing_columns(tensor: DTensor, dimension: int) -> Any:
    """The group of ranks that have the same rows of a tensor, and other columns; None if there is none."""
    mesh = tensor.device_mesh
    split = [at for at, kind in enumerate(tensor.placements) if kind.is_shard(dimension) and mesh.size(at) > 1]
    return mesh.get_group(split[0]) if len(split) == 1 else None


def pieces(place: TensorLocation, region: Region, whole_rows: bool = False) -> Iterator[RowSlice]:
    """List what is read of a tensor for a region of it, in pieces that hold one row at least.

    Args:
        place: of the tensor.
        region: what is wanted of each dimension.
        whole_rows: whether rows of the first dimension are read as a whole, whatever is wanted of them.
    """
    shape, width = place.shape, place.torch_dtype.itemsize
    if not shape:
        yield RowSlice((), 0, 1)
        return
    if any(part.stop <= part.start for part in region):
        return
    cut = [at for at, part in enumerate(region) if part.stop - part.start < shape[at]]
    dimension = 0 if whole_rows or not cut else cut[-1]
    while dimension and (region[dimension].stop - region[dimension].start) * _below(shape, dimension) * width < SHORT:
        dimension -= 1
    at_once = max(1, PIECE // (_below(shape, dimension) * width))
    rows = region[dimension]
    for slab in product(*(range(part.start, part.stop) for part in region[:dimension])):
        for row in range(rows.start, rows.stop, at_once):
            yield RowSlice(slab, row, min(at_once, rows.stop - row))


def dequantize(raw: torch.Tensor, scales: torch.Tensor, row: int, column: int) -> torch.Tensor:
    """What FP8 values stand for, in float32.

    Args:
        raw: [rows, columns].
        scales: of the blocks of these rows, from the first that they touch; of all blocks of columns.
        row: of the first of `raw`, within its block.
        column: of the first of `raw`, in the whole matrix.
    """
    rows, columns = raw.shape
    values, beyond = raw.float(), (column + columns) // FP8_BLOCK
    blocks = torch.arange(row, row + rows, device=raw.device) // FP8_BLOCK
    of_rows = scales.to(raw.device).float()[blocks]
    if column % FP8_BLOCK == 0 and columns % FP8_BLOCK == 0:
        values.view(rows, -1, FP8_BLOCK).mul_(of_rows[:, column // FP8_BLOCK : beyond, None])
        return values
    return values.mul_(of_rows.repeat_interleave(FP8_BLOCK, 1)[:, column : column + columns])


def _values(part: ShardRead, raw: torch.Tensor, scales: torch.Tensor | None, row: int) -> torch.Tensor:
    """What stored elements stand for; the first is in row `row` of the tensor."""
    return raw if scales is None else dequantize(raw, scales, row % FP8_BLOCK, part.region[1].start)


def _put_numbers(part: ShardRead, piece: RowSlice, raw: torch.Tensor, scales: torch.Tensor) -> None:
    """Put what is wanted of a piece in four bits where it belongs.

    Args:
        part: what is wanted.
        piece: of it.
        raw: [rows of the piece, what is below each], with all columns.
        scales: [all rows, groups].
    """
    assert part.codes is not None
    target = _target(part, piece)
    if not target.numel():
        return
    scales = scales.view(*raw.shape[:-1], -1)
    inner = part.region[len(piece.slab) + 1 :]
    values = four_bits.columns_of(
        part.codes, raw[(slice(None), *inner[:-1])], scales[(slice(None), *inner[:-1])], inner[-1], target.device
    )
    if part.codes.turned:  # torch is slow in exchanging dimensions and changing dtypes at once
        target, values = target.mT, values.mT.contiguous()
    target.copy_(values)


def _target(part: ShardRead, piece: RowSlice) -> torch.Tensor:
    """Where a piece goes."""
    slab = tuple(index - wanted.start for index, wanted in zip(piece.slab, part.region, strict=False))
    row = piece.row - part.region[len(slab)].start
    return part.target[(*slab, slice(row, row + piece.rows))]


def _elements(place: TensorLocation, piece: RowSlice) -> tuple[int, int]:
    """The number of a piece's first element in its tensor, and how many elements a row of it has."""
    shape, width = place.shape, _below(place.shape, len(piece.slab))
    at = (*piece.slab, piece.row)
    return (int(np.ravel_multi_index(at, shape[: len(at)])) * width if shape else 0), width


def _share(part: ShardRead) -> int:
    """How many rows of a matrix each rank of a group reads; the last ones read fewer."""
    return -(-part.place.shape[0] // dist.get_world_size(part.group))


def _below(shape: tuple[int, ...], dimension: int) -> int:
    """How many elements a row of a dimension has."""
    return math.prod(shape[dimension + 1 :])
