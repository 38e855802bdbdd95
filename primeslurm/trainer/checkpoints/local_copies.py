"""Copies of the newest checkpoint on the nodes' own disks, for a fast restart.

Each rank writes its shards a second time to its node, and after the commit sends them to a rank of the next node. On a
restart, a node that was replaced gets its shards back from that neighbour, and every rank reads locally.

The shared checkpoint stays the only one that counts. A piece is used from a copy only if its digest is the one that the
shared checkpoint records, and otherwise read from the shared file.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from primeslurm.trainer.checkpoints.shards import CHUNK_BYTES, ByteCounter, CopyFile, wait_with_heartbeats
from primeslurm.trainer.distributed.world import UNEQUAL, World
from primeslurm.wire.stored import checkpoints

_SHARD_NAME = re.compile(r"__(\d+)_\d+" + re.escape(checkpoints.SHARD))
# File name to size [bytes]
Sizes = Mapping[str, int]


class Transfer(NamedTuple):
    """A file to send from one rank to another."""

    source: int
    target: int
    name: str
    size: int


class LocalCopies:
    """On this node's disk: copies of this rank's shards and of those of a rank elsewhere. Methods are collectives.

    `directory` is the same for all ranks of a node. `timeout` limits the wait for one chunk from another rank.
    """

    def __init__(self, directory: Path, world: World, timeout: timedelta) -> None:
        self._world, self._directory = world, directory
        self._rank_directory = directory / f"rank-{world.rank}"
        self._nodes = world.collect(f"{socket.gethostname()}:{directory}")
        self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc=UNEQUAL)
        self._thread = ThreadPoolExecutor(1, "checkpoint-copy")
        self._counter = ByteCounter()
        self._replication: Future[None] | None = None

    def begin(self, step: int) -> Path:
        """Delete the copies of earlier steps, and return the directory for this rank's copies of `step`."""
        self.wait()
        shutil.rmtree(self._rank_directory, ignore_errors=True)
        return self._make_directory(step)

    def replicate(self, step: int) -> None:
        """Start sending this rank's files of a committed checkpoint to another node, while training continues."""
        self._replication = self._thread.submit(self._replicate, step)

    def wait(self) -> None:
        """Wait until the transfer that `replicate` started ends. Raises RankError if a rank could not be reached."""
        if self._replication is not None:
            replication, self._replication = self._replication, None
            self._finish(replication, "copying a checkpoint to another node")

    def recover(self, step: int, shards: Sizes) -> dict[str, Path]:
        """Fetch lost copies of `shards` from other nodes. Return all local copies by file name. Raises RankError."""
        held = self._world.collect(_sizes(self._step_directory(step)))
        if transfers := missing(self._nodes, held, shards):
            self._finish(self._thread.submit(self._move, step, transfers), "getting copies from other nodes")
        return {path.name: path for path in self._directory.glob(f"rank-*/{self._step_directory(step).name}/*")}

    def close(self) -> None:
        """Delete this rank's copies. No call may follow."""
        self.wait()
        self._thread.shutdown()
        shutil.rmtree(self._rank_directory, ignore_errors=True)

    def _finish(self, work: Future[None], doing: str) -> None:
        wait_with_heartbeats([work], self._counter)
        failure = work.exception()
        self._world.agree(failure if isinstance(failure, Exception) else None, doing)

    def _step_directory(self, step: int) -> Path:
        return self._rank_directory / f"step_{step:06d}"

    def _make_directory(self, step: int) -> Path:
        # No parents: the node agent deletes the node's directory when it ends. Nobody would delete a recreated one.
        with contextlib.suppress(OSError):
            for directory in (self._rank_directory, self._step_directory(step)):
                directory.mkdir(exist_ok=True)
        return self._step_directory(step)

    def _replicate(self, step: int) -> None:
        sizes = _sizes(self._step_directory(step))
        written = {name: size for name, size in sizes.items() if _writer(name) == self._world.rank}
        by_rank: list[Sizes] = [{}] * self._world.size
        dist.all_gather_object(by_rank, written, group=self._group)
        transfers = [
            Transfer(rank, replica_rank, name, size)
            for rank, (replica_rank, files) in enumerate(zip(replica_ranks(self._nodes), by_rank, strict=True))
            if replica_rank is not None
            for name, size in sorted(files.items())
        ]
        self._move(step, transfers)

    def _move(self, step: int, transfers: Sequence[Transfer]) -> None:
        # All ranks send in the order of the list and receive in the order of the list. Both ends of the first
        # unfinished transfer are then always waiting for it, so ranks cannot deadlock.
        rank = self._world.rank
        with ThreadPoolExecutor(1, "checkpoint-send") as thread:
            sending = thread.submit(self._send, step, [each for each in transfers if each.source == rank])
            for transfer in transfers:
                if transfer.target == rank:
                    self._receive(step, transfer)
            sending.result()

    def _send(self, step: int, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            with contextlib.ExitStack() as stack:
                file = None
                # The receiver waits for the announced size. After a failed read it gets other bytes, whose digest is
                # wrong, and later reads the shared file instead.
                with contextlib.suppress(OSError):
                    path = self._step_directory(step) / transfer.name
                    file = stack.enter_context(path.open("rb", buffering=0))
                for chunk in _chunk_buffers(transfer.size):
                    if file is not None:
                        with contextlib.suppress(OSError):
                            file.readinto(chunk.numpy().data)
                    dist.send(chunk, transfer.target, group=self._group)
                    self._counter.bytes += len(chunk)

    def _receive(self, step: int, transfer: Transfer) -> None:
        with CopyFile(self._make_directory(step) / transfer.name) as file:
            for chunk in _chunk_buffers(transfer.size):
                dist.recv(chunk, transfer.source, group=self._group)
                file.write(chunk.numpy())
                self._counter.bytes += len(chunk)


def replica_ranks(nodes: Sequence[str]) -> list[int | None]:
    """Return the rank on the next node that keeps the copies of each rank. None for all ranks on a single node."""
    by_node = defaultdict[str, list[int]](list)
    for rank, node in enumerate(nodes):
        by_node[node].append(rank)
    if len(by_node) == 1:
        return [None] * len(nodes)
    order = list(by_node)
    replicas: list[int | None] = []
    for rank, node in enumerate(nodes):
        next_ranks = by_node[order[(order.index(node) + 1) % len(order)]]
        replicas.append(next_ranks[by_node[node].index(rank) % len(next_ranks)])
    return replicas


def missing(nodes: Sequence[str], held: Sequence[Sizes], shards: Sizes) -> list[Transfer]:
    """List transfers of shards whose copies the writer's node lost and another node holds. `held`: copies by rank."""
    transfers = []
    for name, size in sorted(shards.items()):
        writer = _writer(name)
        holders = [rank for rank, files in enumerate(held) if files.get(name) == size]
        if writer is None or writer >= len(nodes) or not holders:
            continue
        if all(nodes[holder] != nodes[writer] for holder in holders):
            transfers.append(Transfer(holders[0], writer, name, size))
    return transfers


def _writer(name: str) -> int | None:
    match = _SHARD_NAME.fullmatch(name)
    return int(match[1]) if match else None


def _sizes(directory: Path) -> dict[str, int]:
    try:
        return {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}
    except OSError:
        return {}


def _chunk_buffers(size: int) -> Iterator[torch.Tensor]:
    """Yield a buffer for each chunk of a file of `size` bytes. All are views of the same memory."""
    buffer = torch.zeros(min(size, CHUNK_BYTES), dtype=torch.uint8)
    for start in range(0, size, CHUNK_BYTES):
        yield buffer[: min(CHUNK_BYTES, size - start)]
