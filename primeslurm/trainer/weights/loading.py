"""Load a model's weights from its safetensors files: each rank reads only the bytes that it needs.

Rows of a tensor are contiguous in the file, so a rank reads its own rows directly. Columns are not: reading only some
columns would touch every page. Ranks that shard a matrix by columns therefore read some whole rows each, and exchange
them. Every byte is read once per replica of the model. FP8 blocks and four-bit codes are dequantized on the device of
the weights.
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

# Bytes per read. The dequantized values take four times as much.
CHUNK_BYTES = 8 << 20
# Shorter runs of wanted bytes are not read one by one: the bytes between them are read, too
MIN_RUN_BYTES = 64 << 10
Region = tuple[slice, ...]


class RowSlice(NamedTuple):
    """Consecutive rows of a tensor: indices into dimension `len(slab)`, at fixed indices `slab` of those before."""

    slab: tuple[int, ...]
    row: int
    rows: int


@dataclass(frozen=True)
class ShardRead:
    """A read of the region of a stored tensor that this rank needs, and its destination."""

    name: str
    place: TensorLocation
    target: torch.Tensor  # destination, in the region's shape
    region: Region
    scaled: bool = False  # whether the tensor is stored in FP8 with scales
    group: Any = None
    """Process group that shards the tensor by columns and reads it together. None: this rank reads alone."""
    codes: FourBits | None = None
    """Four-bit format of the tensor. Place, target and region then refer to the stored codes, with whole rows."""

    def row_slices(self) -> Iterator[RowSlice]:
        """List the reads: those of this rank, or for four-bit tensors those of the whole group."""
        if self.codes is None:
            return row_slices(self.place, self.region, whole_rows=self.scaled)
        if not self.target.numel() and self.group is None:
            return iter(())
        return row_slices(self.place, (*self.region[:-1], slice(0, self.place.shape[-1])))


class Loader:
    """Fills tensors from files, with several threads. Ranks exchange rows on `device`."""

    def __init__(self, files: TensorFiles, device: torch.device) -> None:
        self._files, self._device = files, device
        self._open = OpenFiles(files)
        self._threads = ThreadPoolExecutor(io_threads(), "loading")
        self._thread_local = threading.local()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._open.__exit__()

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, or this rank's shards of them, from the files. Raises as `shard_read`, and OSError.

        A collective of the ranks that shard matrices by columns. They must pass the same names in the same order.
        """
        reads = [shard_read(self._files, name, tensor) for name, tensor in tensors.items()]
        shared = [
            (read, self._threads.submit(self._read_rows, read)) for read in reads if read.group and not read.codes
        ]
        coded = [
            (read, read.codes, rows, self._threads.submit(self._read_codes, read, read.codes, rows))
            for read in reads
            if read.group and read.codes
            for rows in read.row_slices()
        ]
        alone: list[Future[None]] = [
            self._threads.submit(self._read_alone, read, rows)
            for read in reads
            if not read.group
            for rows in read.row_slices()
        ]
        # The main thread does the exchanges, in the same order on all ranks of a group.
        for read, local_rows in shared:
            self._exchange_rows(read, *local_rows.result())
            liveness().heartbeat()
        for read, codes, rows, local_codes in coded:
            self._exchange_codes(read, codes, rows, local_codes.result())
            liveness().heartbeat()
        for done in as_completed(alone):
            done.result()
            liveness().heartbeat()

    @torch.no_grad()
    def _read_alone(self, read: ShardRead, rows: RowSlice) -> None:
        shape, dimension = read.place.shape, len(rows.slab)
        first, width = _elements(read.place, rows)
        raw = self._open.part(read.name, first, rows.rows * width, self._buffer())
        if not shape:
            read.target.copy_(raw.view(()))
            return
        raw = raw.view(rows.rows, *shape[dimension + 1 :])
        if read.codes:
            row, count = first // shape[-1], rows.rows * width // shape[-1]
            _store_codes(read, rows, raw, self._four_bit_scales(read.codes, row, count))
            return
        raw = raw[(slice(None), *read.region[dimension + 1 :])]
        target = _target(read, rows)
        scales = self._scales(read, rows.row, rows.rows) if read.scaled else None
        target.copy_(_values(read, raw.to(target.device), scales, rows.row))

    def _read_rows(self, read: ShardRead) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read this rank's rows of a shared matrix, padded to equal size on all ranks, and the scales of all rows."""
        rows, columns = read.place.shape
        share = rows_per_rank(read)
        first = min(rows, dist.get_rank(read.group) * share)
        count = min(share, rows - first)
        # The all-gather needs the same size on all ranks. The padding is never read.
        padded = torch.empty(share * columns, dtype=read.place.torch_dtype, device=self._device).view(torch.uint8)
        local = self._open.part(read.name, first * columns, count * columns).view(torch.uint8)
        padded[: len(local)].copy_(local)
        return padded, self._scales(read, 0, rows) if read.scaled else None

    @torch.no_grad()
    def _exchange_rows(self, read: ShardRead, local: torch.Tensor, scales: torch.Tensor | None) -> None:
        gathered = local.new_empty(len(local) * dist.get_world_size(read.group))
        dist.all_gather_single(gathered, local, group=read.group)
        raw = gathered.view(read.place.torch_dtype).view(-1, read.place.shape[1])[read.region]
        read.target.copy_(_values(read, raw, scales, 0))

    def _scales(self, read: ShardRead, row: int, rows: int) -> torch.Tensor:
        name = read.name + FP8_SCALE
        first, last, width = row // FP8_BLOCK, -(-(row + rows) // FP8_BLOCK), self._files.places[name].shape[1]
        return self._open.part(name, first * width, (last - first) * width).view(-1, width)

    def _four_bit_scales(self, codes: FourBits, row: int, rows: int) -> torch.Tensor:
        groups = codes.scales.shape[-1]
        return self._open.at(codes.scales, row * groups, rows * groups).view(rows, groups)

    def _read_codes(self, read: ShardRead, codes: FourBits, rows: RowSlice) -> torch.Tensor:
        """Read this rank's rows of a four-bit slice as bytes [rows, codes then scales], padded to the same size."""
        width = read.place.shape[-1]
        row, count = (number // width for number in _elements(read.place, rows))
        count *= rows.rows
        share = -(-count // dist.get_world_size(read.group))
        skipped = min(count, dist.get_rank(read.group) * share)
        local = min(share, count - skipped)
        scales = self._four_bit_scales(codes, row + skipped, local).view(torch.uint8)
        padded = torch.empty(share, width + codes.scales.nbytes // math.prod(codes.rows), dtype=torch.uint8)
        padded[:local, :width] = self._open.part(read.name, (row + skipped) * width, local * width).view(-1, width)
        padded[:local, width:] = scales.view(local, padded.shape[1] - width)
        return padded.to(self._device)

    @torch.no_grad()
    def _exchange_codes(self, read: ShardRead, codes: FourBits, rows: RowSlice, local: torch.Tensor) -> None:
        gathered = local.new_empty(len(local) * dist.get_world_size(read.group), local.shape[1])
        dist.all_gather_single(gathered, local, group=read.group)
        shape, width = read.place.shape, read.place.shape[-1]
        gathered = gathered[: rows.rows * _elements(read.place, rows)[1] // width]
        raw = gathered[:, :width].view(rows.rows, *shape[len(rows.slab) + 1 :])
        _store_codes(read, rows, raw, gathered[:, width:].contiguous().view(codes.scales.torch_dtype))

    def _buffer(self) -> NDArray[np.uint8]:
        # One buffer per thread, because page faults of fresh memory cost more than the copy.
        if not hasattr(self._thread_local, "bytes"):
            self._thread_local.bytes = host_memory(self._device)(CHUNK_BYTES)
        data: NDArray[np.uint8] = self._thread_local.bytes
        return data


def shard_read(files: TensorFiles, name: str, tensor: Any) -> ShardRead:
    """Return the read of this rank's shard of a tensor. Raises ValueError if the stored tensor does not fit."""
    place, scaled, codes = files.places[name], name + FP8_SCALE in files.places, files.four_bits.get(name)
    stored = codes.shape if codes else place.shape
    if tuple(tensor.shape) != stored:
        in_files, in_model = (" x ".join(map(str, shape)) for shape in (stored, tensor.shape))
        raise ValueError(f"{files.directory}: {name} is {in_files} in the files, but {in_model} by the model's config")
    if scaled and len(place.shape) != 2:
        raise ValueError(f"{files.directory}: {name} is stored in FP8 but is no matrix: convert it to bfloat16 first")
    distributed = isinstance(tensor, DTensor)
    target = (tensor.to_local() if distributed else tensor).detach()
    region = compat.local_region(tensor) if distributed else tuple(slice(0, length) for length in stored)
    if codes is None:
        return ShardRead(name, place, target, region, scaled, _column_group(tensor, place) if distributed else None)
    column_dimension = len(stored) - (2 if codes.transposed else 1)
    group = _group_of_dimension(tensor, column_dimension) if distributed else None
    if codes.transposed:
        target, region = target.mT, (*region[:-2], region[-1], region[-2])
    return ShardRead(name, place, target, region, scaled, group, codes)


def _column_group(tensor: DTensor, place: TensorLocation) -> Any:
    """Return the group that shards a matrix by columns. None if it is sharded in another way."""
    mesh = tensor.device_mesh
    split = [at for at, placement in enumerate(tensor.placements) if placement.is_shard() and mesh.size(at) > 1]
    if len(place.shape) != 2 or len(split) != 1 or not tensor.placements[split[0]].is_shard(1):
        return None
    return mesh.get_group(split[0])


def _group_of_dimension(tensor: DTensor, dimension: int) -> Any:
    """Return the group of ranks that have the same rows and other columns (`dimension`). None if there is none."""
    mesh = tensor.device_mesh
    split = [at for at, each in enumerate(tensor.placements) if each.is_shard(dimension) and mesh.size(at) > 1]
    return mesh.get_group(split[0]) if len(split) == 1 else None


def row_slices(place: TensorLocation, region: Region, whole_rows: bool = False) -> Iterator[RowSlice]:
    """List the reads for a region, of whole rows if `whole_rows`. Each has one row, or at most CHUNK_BYTES."""
    shape, width = place.shape, place.torch_dtype.itemsize
    if not shape:
        yield RowSlice((), 0, 1)
        return
    if any(wanted.stop <= wanted.start for wanted in region):
        return
    cut = [at for at, wanted in enumerate(region) if wanted.stop - wanted.start < shape[at]]
    dimension = 0 if whole_rows or not cut else cut[-1]
    # Read along an outer dimension if the contiguous runs along this one are too short.
    while dimension and _length(region[dimension]) * _below(shape, dimension) * width < MIN_RUN_BYTES:
        dimension -= 1
    at_once = max(1, CHUNK_BYTES // (_below(shape, dimension) * width))
    rows = region[dimension]
    for slab in product(*(range(wanted.start, wanted.stop) for wanted in region[:dimension])):
        for row in range(rows.start, rows.stop, at_once):
            yield RowSlice(slab, row, min(at_once, rows.stop - row))


def rows_per_rank(read: ShardRead) -> int:
    """Return the number of rows of a shared matrix that each rank of its group reads. The last ranks read fewer."""
    return -(-read.place.shape[0] // dist.get_world_size(read.group))


def dequantize(raw: torch.Tensor, scales: torch.Tensor, row: int, column: int) -> torch.Tensor:
    """Dequantize block-scaled FP8 values [rows, columns] to float32.

    `scales` are those of the blocks that these rows touch [blocks of rows, all blocks of columns]. `row` is the row of
    the first value within its block, and `column` its column in the matrix.
    """
    rows, columns = raw.shape
    values, end_block = raw.float(), (column + columns) // FP8_BLOCK
    blocks = torch.arange(row, row + rows, device=raw.device) // FP8_BLOCK
    row_scales = scales.to(raw.device).float()[blocks]
    if column % FP8_BLOCK == 0 and columns % FP8_BLOCK == 0:
        values.view(rows, -1, FP8_BLOCK).mul_(row_scales[:, column // FP8_BLOCK : end_block, None])
        return values
    return values.mul_(row_scales.repeat_interleave(FP8_BLOCK, 1)[:, column : column + columns])


def _values(read: ShardRead, raw: torch.Tensor, scales: torch.Tensor | None, row: int) -> torch.Tensor:
    return raw if scales is None else dequantize(raw, scales, row % FP8_BLOCK, read.region[1].start)


def _store_codes(read: ShardRead, rows: RowSlice, raw: torch.Tensor, scales: torch.Tensor) -> None:
    """Dequantize the wanted columns of codes `raw` [rows, ..., bytes of all columns], and store them."""
    assert read.codes is not None
    target = _target(read, rows)
    if not target.numel():
        return
    scales = scales.view(*raw.shape[:-1], -1)
    inner = read.region[len(rows.slab) + 1 :]
    values = four_bits.columns_of(
        read.codes, raw[(slice(None), *inner[:-1])], scales[(slice(None), *inner[:-1])], inner[-1], target.device
    )
    if read.codes.transposed:  # copy_ is slow if it has to transpose and cast at once
        target, values = target.mT, values.mT.contiguous()
    target.copy_(values)


def _target(read: ShardRead, rows: RowSlice) -> torch.Tensor:
    slab = tuple(index - wanted.start for index, wanted in zip(rows.slab, read.region, strict=False))
    row = rows.row - read.region[len(slab)].start
    return read.target[(*slab, slice(row, row + rows.rows))]


def _elements(place: TensorLocation, rows: RowSlice) -> tuple[int, int]:
    """Return the flat index of the first element of a slice, and the number of elements per row."""
    shape, width = place.shape, _below(place.shape, len(rows.slab))
    at = (*rows.slab, rows.row)
    return (int(np.ravel_multi_index(at, shape[: len(at)])) * width if shape else 0), width


def _below(shape: tuple[int, ...], dimension: int) -> int:
    return math.prod(shape[dimension + 1 :])


def _length(wanted: slice) -> int:
    return int(wanted.stop - wanted.start)
