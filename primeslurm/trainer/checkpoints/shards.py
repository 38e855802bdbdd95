"""Checkpoint shards on disk, with digests that are computed during the write and checked during the read.

The format is PyTorch's Distributed Checkpoint (DCP): `.metadata` maps each stored piece of a tensor to a file and an
offset. We add a digest per piece to `.metadata`, which the stock reader ignores. A rank can then verify exactly the
pieces that it reads, in the same pass. `COMMITTED` holds a digest of each whole file and of `.metadata`.
"""

from __future__ import annotations

import heapq
import io
import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import set_crc32_options

from primeslurm.base import files
from primeslurm.records.heartbeats import liveness
from primeslurm.wire.stored import checksums, manifest
from primeslurm.wire.stored.manifest import FileRecord

log = logging.getLogger(__name__)
T = TypeVar("T")
# Bytes per read or write call. Progress is counted after each chunk.
CHUNK_BYTES = 64 << 20
# A rank splits its shards over several files, written in parallel, once they exceed this size
FILE_BYTES = 1 << 30


class DamagedShardError(Exception):
    """A stored piece of a tensor differs from what was written."""


@dataclass
class ByteCounter:
    """Counts the bytes that this rank's threads have read or written, so that heartbeats can show progress."""

    bytes: int = 0


class CopyFile:
    """A best-effort copy of a checkpoint file on a local disk. Any failure only drops the copy. Path None: no copy."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        if path is not None:
            try:
                self._file = path.open("wb", buffering=0)
            except OSError as error:
                self._give_up(error)

    def __enter__(self) -> CopyFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._give_up(error)
        elif self._file is not None:
            self._file.close()

    def write(self, data: Any) -> None:
        left = memoryview(data).cast("B")
        try:
            while self._file is not None and left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: BaseException | None) -> None:
        log.warning("cannot write a local checkpoint copy: %s: %s", self._path, error)
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as unlink_error:
                log.warning("cannot delete the incomplete copy %s: %s", self._path, unlink_error)


class ShardWriter(dcp.FileSystemWriter):
    """Writes this rank's tensors to at most `threads` files in parallel, and flushes each file when it is complete.

    Float32 tensors with a name suffix in `rounded` are stored in bfloat16. `copies` is a directory on this node for
    copies of the files.
    """

    def __init__(
        self,
        directory: Path,
        counter: ByteCounter,
        threads: int,
        rounded: tuple[str, ...] = (),
        copies: Path | None = None,
    ) -> None:
        super().__init__(directory)
        self._rounded, self._copies = rounded, copies
        self.files: list[FileRecord] = []
        """On rank 0 after `finish`: records of all ranks' files, relative to the checkpoint."""
        self._directory, self._counter, self._threads = directory, counter, threads

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        """Write the planned items. The results hold the place and digest of each item, and a record of each file."""
        total = sum(_item_bytes(item) for item in plan.items)
        count = max(1, min(self._threads, math.ceil(total / FILE_BYTES)))
        names = [f"{plan.storage_data.prefix}{number}.distcp" for number in range(count)]
        set_crc32_options(False)  # XXH3 is stronger than torch.save's CRC-32, at a fifth of the cost
        with ThreadPoolExecutor(count, "checkpoint-file") as threads:
            by_file = threads.map(
                lambda name, items: self._write(name, items, planner), names, _balanced(plan.items, count)
            )
            return _done([result for results in by_file for result in results])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, keep the file records and write `.metadata`."""
        everything = [result for rank in results for result in rank]
        self.files = [each.storage_data for each in everything if isinstance(each.storage_data, FileRecord)]
        rest = [[each for each in everything if not isinstance(each.storage_data, FileRecord)]]
        write = super().finish
        files.retrying(self._directory / ".metadata", lambda: write(metadata, rest))

    def _write(self, name: str, items: Sequence[Any], planner: Any) -> list[WriteResult]:
        # After a failed fsync the kernel may have dropped dirty pages, so every retry rewrites the whole file.
        return files.retrying(self._directory / name, lambda: self._write_once(name, items, planner))

    def _write_once(self, name: str, items: Sequence[Any], planner: Any) -> list[WriteResult]:
        results: list[WriteResult] = []
        copy = CopyFile(self._copies / name if self._copies else None)
        with copy, (self._directory / name).open("wb", buffering=1 << 20) as file:
            stream = _DigestStream(file, self._counter, copy)
            for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                offset = stream.bytes
                data = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    stream.write(data.getbuffer())
                else:
                    # Round one tensor at a time: rounding all at once would need memory for all copies.
                    if data.dtype == torch.float32 and item.index.fqn.endswith(self._rounded):
                        data = data.to(torch.bfloat16)
                    torch.save(_compact_on_cpu(data), cast(IO[bytes], stream))
                place = _StorageInfo(name, offset, stream.bytes - offset)
                place.digest = stream.item_digest()  # type: ignore[attr-defined]
                results.append(WriteResult(item.index, stream.bytes - offset, place))
            file.flush()
            os.fsync(file.fileno())
        record = FileRecord(f"{self._directory.name}/{name}", stream.bytes, stream.file_digest())
        return [*results, WriteResult(MetadataIndex(name), stream.bytes, record)]


class ShardReader(dcp.FileSystemReader):
    """Reads each stored piece once, from its local copy (`copies`, by file name) if possible, and verifies digests."""

    def __init__(
        self, directory: Path, counter: ByteCounter, threads: int, copies: Mapping[str, Path] | None = None
    ) -> None:
        super().__init__(directory)
        self._directory, self._counter, self._threads = directory, counter, threads
        self._copies = copies or {}
        self.bytes_from_copies = 0

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        read = super().read_metadata
        return files.retrying(self._directory / ".metadata", lambda: read(*args, **options))

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Fill the planned tensors. After DamagedShardError, tensors read before the damaged piece are overwritten."""
        pieces: dict[tuple[str, int, int], _StoredPiece] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            key = (place.relative_path, place.offset, place.length)
            pieces.setdefault(key, _StoredPiece(*key, getattr(place, "digest", None))).items.append(item)
        by_thread = _by_thread(sorted(pieces.values(), key=lambda piece: (piece.file, piece.offset)), self._threads)
        with ThreadPoolExecutor(len(by_thread) or 1, "checkpoint-read") as threads:
            reads = [threads.submit(self._read, assigned, planner) for assigned in by_thread]
            wait_with_heartbeats(reads, self._counter)
            for read in reads:
                for item, value in read.result():
                    planner.load_bytes(item, value)  # not thread-safe: it changes the state's structure
        return _done(None)

    def _read(self, pieces: Sequence[_StoredPiece], planner: Any) -> list[tuple[Any, io.BytesIO]]:
        """Fill the tensors of some pieces. Return the items that are not tensors, undecoded."""
        objects: list[tuple[Any, io.BytesIO]] = []
        # One buffer for all pieces: page faults of fresh memory cost more than the copy.
        buffer = bytearray(max((piece.length for piece in pieces), default=0))
        for piece in pieces:
            data = memoryview(buffer)[: piece.length]
            if self._read_copy(piece, data):
                self.bytes_from_copies += piece.length
            else:
                _read_shared(self._directory / piece.file, piece, data, self._counter)
            tensors = []
            for item in piece.items:
                if item.type == LoadItemType.BYTE_IO:
                    objects.append((item, io.BytesIO(bytes(data))))
                else:
                    tensors.append(item)
            if tensors:
                _copy_to_targets(_MemoryFile(data), tensors, planner)
        return objects

    def _read_copy(self, piece: _StoredPiece, data: memoryview) -> bool:
        copy = self._copies.get(piece.file)
        if copy is None or piece.digest is None:
            return False
        try:
            _read_checked(copy, piece, data, self._counter)
        except (OSError, DamagedShardError) as error:
            log.warning("reading the shared file instead of its local copy: %s", error)
            return False
        return True


@dataclass
class _StoredPiece:
    """A stored piece of a tensor, and the load items that need some of it."""

    file: str
    offset: int
    length: int
    digest: bytes | None
    items: list[Any] = field(default_factory=list)


class _DigestStream:
    """An append-only file that computes digests of the file and of each item, and also writes a copy."""

    def __init__(self, file: BinaryIO, counter: ByteCounter, copy: CopyFile) -> None:
        self.bytes = 0
        self._file, self._counter, self._copy = file, counter, copy
        self._file_hash, self._item_hash = checksums.hasher(), checksums.hasher()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._file_hash.update(chunk)
            self._item_hash.update(chunk)
            self._file.write(chunk)
            self._copy.write(chunk)
            self._counter.bytes += len(chunk)
        self.bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing. torch.save flushes after every tensor, but one flush at the end of the file is enough."""

    def item_digest(self) -> bytes:
        """Return the digest of the bytes written since the last call."""
        digest = self._item_hash.digest()
        self._item_hash.reset()
        return digest

    def file_digest(self) -> str:
        return checksums.XXH3 + self._file_hash.hexdigest()


class _MemoryFile(io.RawIOBase):
    """A readable file over existing memory. Unlike `io.BytesIO`, it does not copy."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        source = self._data[self._at : self._at + len(target)]
        target[: len(source)] = source
        self._at += len(source)
        return len(source)


def wait_with_heartbeats(work: Iterable[ThreadFuture[Any]], counter: ByteCounter) -> None:
    seen, pending = counter.bytes, set(work)
    while pending:
        pending = wait(pending, timeout=1.0).not_done
        if counter.bytes != seen:
            seen = counter.bytes
            liveness().heartbeat()


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _balanced(items: Sequence[Any], count: int) -> list[list[Any]]:
    """Spread items over files of similar size: largest item first, each to the currently smallest file."""
    by_file: list[list[Any]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for item in sorted(items, key=_item_bytes, reverse=True):
        size, number = heap[0]
        by_file[number].append(item)
        heapq.heapreplace(heap, (size + _item_bytes(item), number))
    return by_file


def _by_thread(pieces: Sequence[_StoredPiece], threads: int) -> list[list[_StoredPiece]]:
    """Divide the pieces into one list of neighbours per thread, of about the same total size."""
    bytes_per_thread = sum(piece.length for piece in pieces) / max(1, threads)
    assigned: dict[int, list[_StoredPiece]] = defaultdict(list)
    offset = 0
    for piece in pieces:
        assigned[int(offset // bytes_per_thread) if bytes_per_thread else 0].append(piece)
        offset += piece.length
    return list(assigned.values())


def _read_shared(path: Path, piece: _StoredPiece, data: memoryview, counter: ByteCounter) -> None:
    """Read a piece from the shared file system. Raises DamagedShardError if it differs, and OSError."""
    failure: DamagedShardError | FileNotFoundError | None = None

    def look() -> bool | None:
        nonlocal failure
        try:
            files.retrying(path, lambda: _read_checked(path, piece, data, counter))
        except (DamagedShardError, FileNotFoundError) as error:
            failure = error
            return None
        return True

    # A network file system may show this node an old state, so missing or different content is read again later.
    if not files.until_seen(look, path.parent, path):
        assert failure is not None
        raise failure


def _read_checked(path: Path, piece: _StoredPiece, data: memoryview, counter: ByteCounter) -> None:
    hasher = checksums.hasher()
    with path.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        done = 0
        while done < len(data):
            count = file.readinto(data[done : done + CHUNK_BYTES])
            if not count:
                break
            hasher.update(data[done : done + count])
            done += count
            counter.bytes += count
    if done < len(data) or piece.digest not in (None, hasher.digest()):
        raise DamagedShardError(manifest.describe_difference(path))


def _copy_to_targets(stored: _MemoryFile, items: Sequence[Any], planner: Any) -> None:
    tensor = torch.load(stored, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    for item in items:
        region = tensor
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            region = region.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(region)  # also casts moments that were stored in bfloat16 back to float32
        planner.commit_tensor(item, target)


def _compact_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    # Return the tensor in host memory with a storage of its own, because torch.save writes whole storages.
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _item_bytes(item: Any) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
