"""vLLM's tier of KV blocks in files, with a size limit: the least recently used blocks are deleted."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.tiering.fs.io import batch_store_block
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager


class BlockFiles:
    """The block files of one directory. All have the same size, and together at most `max_bytes`. Thread-safe."""

    def __init__(self, directory: Path, block_bytes: int, max_bytes: int) -> None:
        self._limit = max_bytes // block_bytes
        if not self._limit:
            raise ValueError(f"a KV block has {block_bytes} bytes, but the disk tier has only {max_bytes}")
        self._lock = threading.Lock()
        self._writing: set[str] = set()
        # A restarted engine finds the files of the process before it.
        files = sorted((path.stat().st_mtime_ns, str(path)) for path in directory.rglob("*.bin"))
        self._files: OrderedDict[str, None] = OrderedDict.fromkeys(path for _, path in files)
        self._delete_down_to(self._limit)

    def write(self, paths: Sequence[str], write: Callable[[Sequence[int]], None]) -> None:
        """Make room for the missing files among `paths`, and call `write` with the indices of those that fit."""
        with self._lock:
            self._used(paths)
            missing = [i for i, path in enumerate(paths) if path not in self._files and path not in self._writing]
            missing = missing[: self._limit - len(self._writing)]
            new = [paths[i] for i in missing]
            self._writing.update(new)
            self._delete_down_to(self._limit - len(self._writing))
        try:
            if missing:
                write(missing)
        finally:
            with self._lock:
                self._writing.difference_update(new)
                self._files.update((path, None) for path in new if Path(path).exists())

    def used(self, paths: Iterable[str]) -> None:
        """Mark files as just read, so that the other files are deleted first."""
        with self._lock:
            self._used(paths)

    def _used(self, paths: Iterable[str]) -> None:
        for path in paths:
            if path in self._files:
                self._files.move_to_end(path)

    def _delete_down_to(self, count: int) -> None:
        # An open file stays readable. A load that finds no file fails, and vLLM computes its blocks again.
        while len(self._files) > count:
            path, _ = self._files.popitem(last=False)
            Path(path).unlink(missing_ok=True)


class BoundedFileTier(FileSystemTierManager):
    """vLLM's file system tier for one engine, in a directory of its own, with a limit on its size."""

    def __init__(self, *, root_dir: str, max_bytes: int, **options: Any) -> None:
        super().__init__(root_dir=root_dir, **options)
        self._files = BlockFiles(Path(root_dir), self._block_size, max_bytes)

    def submit_store(self, job_metadata: Any) -> None:
        paths = [self.file_mapper.get_file_name(key) for key in job_metadata.keys]
        offsets = [int(chunk) * self._block_size for chunk in job_metadata.chunk_ids]

        def write(chosen: Sequence[int]) -> None:
            chosen_paths, chosen_offsets = [paths[i] for i in chosen], [offsets[i] for i in chosen]
            batch_store_block(chosen_paths, self._primary_kv_view, chosen_offsets, self._block_size, self._use_o_direct)

        self._job_block_counts[job_metadata.job_id] = len(paths)
        self._pool.enqueue_store(job_metadata.job_id, 1, [partial(self._files.write, paths, write)])

    def submit_load(self, job_metadata: Any) -> None:
        self._files.used(self.file_mapper.get_file_name(key) for key in job_metadata.keys)
        super().submit_load(job_metadata)
