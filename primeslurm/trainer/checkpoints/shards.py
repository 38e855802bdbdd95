"""Tensors of a checkpoint on disk: digests are made while they are written, and checked while they are read.

The format is torch's (DCP): `.metadata` says in which file, and where in it, each part of each tensor is. It also
has the digest of each part (which torch's own reader passes over), so that whoever reads some parts checks these, and
reads nothing twice. `COMMITTED` has the digest of each file as a whole, and of `.metadata`.
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
from primeslurm.trainer.checkpoints.local_files import CopyFile
from primeslurm.trainer.distributed.cores import allowed
from primeslurm.wire.stored import digests, manifest
from primeslurm.wire.stored.manifest import FileRecord

log = logging.getLogger(__name__)
T = TypeVar("T")
PIECE = 64 << 20
"""Bytes that are written and read at once: after each, there is progress to tell of."""
FILE_BYTES = 1 << 30
"""A rank writes further files, side by side, when it has more than this for each."""


class DamagedShardError(Exception):
    """A part of a checkpoint is not what was written."""


@dataclass
class Moved:
    """How many bytes the threads of this rank have written or read: whoever waits for them sees them go on."""

    bytes: int = 0


class ShardWriter(dcp.FileSystemWriter):
    """Writes this rank's tensors into one file or several, each flushed when it is complete.

    Args:
        directory: of the trainer's part of a checkpoint.
        moved: counts what is written.
        threads: files that are written at once, at most.
        rounded: endings of names whose float32 tensors are stored in bfloat16. Readers make them float32 again.
        copies: directory on the node for copies of this rank's files.
    """

    def __init__(
        self, directory: Path, moved: Moved, threads: int, rounded: tuple[str, ...] = (), copies: Path | None = None
    ) -> None:
        super().__init__(directory)
        self._rounded, self._copies = rounded, copies
        self.files: list[FileRecord] = []
        """On rank 0, once all is written: records of all ranks' files, relative to the checkpoint."""
        self._directory, self._moved, self._threads = directory, moved, threads

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        """Write what the plan says; where each part is, its digest, and a record of each file are the result."""
        total = sum(_bytes_of(item) for item in plan.items)
        count = max(1, min(self._threads, math.ceil(total / FILE_BYTES)))
        names = [f"{plan.storage_data.prefix}{number}.distcp" for number in range(count)]
        shares = _shares(plan.items, count)
        set_crc32_options(False)  # XXH3 sees more, at a fifth of the price
        with ThreadPoolExecutor(count, "checkpoint-file") as threads:
            written = threads.map(lambda name, items: self._write(name, items, planner), names, shares)
            results = [result for file in written for result in file]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: keep the records of files, and write `.metadata`."""
        everything = [result for rank in results for result in rank]
        self.files = [each.storage_data for each in everything if isinstance(each.storage_data, FileRecord)]
        rest = [[each for each in everything if not isinstance(each.storage_data, FileRecord)]]
        write = super().finish
        files.retrying(self._directory / ".metadata", lambda: write(metadata, rest))

    def _write(self, name: str, items: Sequence[Any], planner: Any) -> list[WriteResult]:
        """Write one file. A failed flush loses what was written: each try writes the file from its beginning."""
        return files.retrying(self._directory / name, lambda: self._write_once(name, items, planner))

    def _write_once(self, name: str, items: Sequence[Any], planner: Any) -> list[WriteResult]:
        results: list[WriteResult] = []
        copy = CopyFile(self._copies / name if self._copies else None)
        with copy, (self._directory / name).open("wb", buffering=1 << 20) as file:
            stream = _Digesting(file, self._moved, copy)
            for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                offset = stream.bytes
                data = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    stream.write(data.getbuffer())
                else:
                    if data.dtype == torch.float32 and item.index.fqn.endswith(self._rounded):
                        data = data.to(torch.bfloat16)  # one at a time: all at once would need space
                    torch.save(_alone_on_cpu(data), cast(IO[bytes], stream))
                where = _StorageInfo(name, offset, stream.bytes - offset)
                where.digest = stream.part_digest()  # type: ignore[attr-defined]
                results.append(WriteResult(item.index, stream.bytes - offset, where))
            file.flush()
            os.fsync(file.fileno())
        record = FileRecord(f"{self._directory.name}/{name}", stream.bytes, stream.digest())
        return [*results, WriteResult(MetadataIndex(name), stream.bytes, record)]


class ShardReader(dcp.FileSystemReader):
    """Reads this rank's tensors, each stored part once, and checks every part that has a digest.

    Args:
        directory: of the trainer's part of a checkpoint.
        moved: counts what is read.
        threads: that read at once.
        copies: of files on this node, by their names. A part is taken from them if it has its digest.
    """

    def __init__(self, directory: Path, moved: Moved, threads: int, copies: Mapping[str, Path] | None = None) -> None:
        super().__init__(directory)
        self._directory, self._moved, self._threads = directory, moved, threads
        self._copies = copies or {}
        self.bytes_of_copies = 0
        """How much did not come from the shared file system."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Read what is where."""
        read = super().read_metadata
        return files.retrying(self._directory / ".metadata", lambda: read(*args, **options))

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Fill what the plan says. Raises DamagedError, with what is filled so far as it is."""
        parts: dict[tuple[str, int, int], _StoredShard] = {}
        for item in plan.items:
            where = self.storage_data[item.storage_index]
            key = (where.relative_path, where.offset, where.length)
            parts.setdefault(key, _StoredShard(*key, getattr(where, "digest", None))).items.append(item)
        by_thread = _spread(sorted(parts.values(), key=lambda part: (part.file, part.offset)), self._threads)
        with ThreadPoolExecutor(len(by_thread) or 1, "checkpoint-part") as threads:
            reads = [threads.submit(self._read, share, planner) for share in by_thread]
            wait_with_heartbeats(reads, self._moved)
            for read in reads:
                for item, value in read.result():
                    planner.load_bytes(item, value)  # not several at once: it changes the state's structure
        return _done(None)

    def _read(self, parts: Sequence[_StoredShard], planner: Any) -> list[tuple[Any, io.BytesIO]]:
        """Fill tensors. Returns what is none, undecoded."""
        objects: list[tuple[Any, io.BytesIO]] = []
        space = bytearray(max((part.length for part in parts), default=0))  # used again: fresh pages cost more
        for part in parts:
            data = memoryview(space)[: part.length]
            if self._from_copy(part, data):
                self.bytes_of_copies += part.length
            else:
                _fill_for_sure(self._directory / part.file, part, data, self._moved)
            for item in part.items:
                if item.type == LoadItemType.BYTE_IO:
                    objects.append((item, io.BytesIO(bytes(data))))
            tensors = [item for item in part.items if item.type != LoadItemType.BYTE_IO]
            if tensors:
                _copy(_View(data), tensors, planner)
        return objects

    def _from_copy(self, part: _StoredShard, data: memoryview) -> bool:
        copy = self._copies.get(part.file)
        if copy is None or part.digest is None:
            return False
        try:
            _fill(copy, part, data, self._moved)
        except (OSError, DamagedShardError) as error:
            log.warning("reads the shared file: %s", error)
            return False
        return True


@dataclass
class _StoredShard:
    """A stored part of a tensor, and who wants something of it."""

    file: str
    offset: int
    length: int
    digest: bytes | None
    items: list[Any] = field(default_factory=list)


class _Digesting:
    """A file that is written from its beginning to its end, with its digest and those of its parts, and with a copy."""

    def __init__(self, file: BinaryIO, moved: Moved, copy: CopyFile) -> None:
        self.bytes = 0
        self._file, self._moved, self._copy = file, moved, copy
        self._whole, self._part = digests.hasher(), digests.hasher()

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            self._whole.update(piece)
            self._part.update(piece)
            self._file.write(piece)
            self._copy.write(piece)
            self._moved.bytes += len(piece)
        self.bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: the file is flushed once, at its end."""

    def part_digest(self) -> bytes:
        """Return the digest of what was written since the last call."""
        found = self._part.digest()
        self._part.reset()
        return found

    def digest(self) -> str:
        """Return the digest of the whole, as records have it."""
        return digests.XXH3 + self._whole.hexdigest()


class _View(io.RawIOBase):
    """A file in memory that is not copied, as `io.BytesIO` would."""

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
        found = self._data[self._at : self._at + len(target)]
        target[: len(found)] = found
        self._at += len(found)
        return len(found)


def _done(value: T) -> Future[T]:
    """What torch waits for, of work that is over."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def threads_of_a_rank() -> int:
    """Return how many files a rank writes or reads at once: its part of the CPUs, but four at most."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or max(1, torch.cuda.device_count()))
    return max(1, min(4, len(allowed()) // ranks))


def wait_with_heartbeats(work: Iterable[ThreadFuture[Any]], moved: Moved) -> None:
    """Wait for threads, in the main one; it beats as long as they move bytes, however many there are."""
    seen, left = moved.bytes, set(work)
    while left:
        left = wait(left, timeout=1.0).not_done
        if moved.bytes != seen:
            seen = moved.bytes
            liveness().heartbeat()


def _shares(items: Sequence[Any], count: int) -> list[list[Any]]:
    """Spread parts over files of about the same size: the largest first, each to the smallest file."""
    found: list[list[Any]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for item in sorted(items, key=_bytes_of, reverse=True):
        size, number = heap[0]
        found[number].append(item)
        heapq.heapreplace(heap, (size + _bytes_of(item), number))
    return found


def _fill_for_sure(path: Path, part: _StoredShard, data: memoryview, moved: Moved) -> None:
    """Fill from the shared file system. What differs, or is not there, is looked at again: this node may be behind.

    Raises:
        DamagedShardError: content differs at the second look, too.
        OSError: the file is not there, or cannot be read.
    """
    failure: DamagedShardError | FileNotFoundError | None = None

    def look() -> bool | None:
        nonlocal failure
        try:
            files.retrying(path, lambda: _fill(path, part, data, moved))
        except (DamagedShardError, FileNotFoundError) as error:
            failure = error
            return None
        return True

    if not files.until_seen(look, path.parent, path):
        assert failure is not None
        raise failure


def _fill(path: Path, part: _StoredShard, data: memoryview, moved: Moved) -> None:
    found = digests.hasher()
    with path.open("rb", buffering=0) as file:
        file.seek(part.offset)
        done = 0
        while done < len(data):
            count = file.readinto(data[done : done + PIECE])
            if not count:
                break
            found.update(data[done : done + count])
            done += count
            moved.bytes += count
    if done < len(data) or part.digest not in (None, found.digest()):
        raise DamagedShardError(manifest.differs(path))


def _copy(stored: _View, items: Sequence[Any], planner: Any) -> None:
    tensor = torch.load(stored, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    for item in items:
        part = tensor
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)  # casts, too: what was saved in bfloat16 is float32 again
        planner.commit_tensor(item, target)


def _spread(parts: Sequence[_StoredShard], threads: int) -> list[list[_StoredShard]]:
    """Give each thread neighbouring parts, of about the same number of bytes."""
    share = sum(part.length for part in parts) / max(1, threads)
    found: dict[int, list[_StoredShard]] = defaultdict(list)
    before = 0
    for part in parts:
        found[int(before // share) if share else 0].append(part)
        before += part.length
    return list(found.values())


def _alone_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory, without what it shares its storage with: torch saves whole storages."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _bytes_of(item: Any) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
