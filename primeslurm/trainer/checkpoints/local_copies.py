"""The last checkpoint's shards on the nodes that wrote them, each copied once to another node: for a fast restart.

A rank writes its files twice at once: to the shared file system, where they count, and to a directory of its node
(`checkpoint.local`), where they do not. After the commit it sends them to a rank of the next node. When ranks start
again, those of a node that has lost its directory get theirs back from there. Every part that is read from a copy must
have the digest that the shared checkpoint has of it; where it has another, or there is no copy, the shared one is read.
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

from primeslurm.trainer.checkpoints.local_files import CopyFile
from primeslurm.trainer.checkpoints.shards import PIECE, Moved, wait_with_heartbeats
from primeslurm.trainer.distributed.collective_count import UNEQUAL
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.stored import checkpoints

_WRITER = re.compile(r"__(\d+)_\d+" + re.escape(checkpoints.SHARD))
Sizes = Mapping[str, int]
"""Bytes by name of a file."""


class Transfer(NamedTuple):
    """A file that goes from one rank to another."""

    source: int
    target: int
    name: str
    size: int


class LocalCopies:
    """This rank's copies, and those that it keeps for a rank of another node. All ranks call each method together.

    Args:
        directory: of this node, the same for all of its ranks (`LOCAL_CHECKPOINTS`).
        world: the ranks.
        timeout: of a piece of a file that another rank sends.
    """

    def __init__(self, directory: Path, world: World, timeout: timedelta) -> None:
        self._world, self._directory = world, directory
        self._own = directory / f"rank-{world.rank}"
        self._nodes = world.collect(f"{socket.gethostname()}:{directory}")
        self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc=UNEQUAL)
        self._thread = ThreadPoolExecutor(1, "checkpoint-copy")
        self._moved = Moved()
        self._copying: Future[None] | None = None

    def begin(self, step: int) -> Path:
        """Return the directory for this rank's copies of a step. Those of the step before make room for them."""
        self.settle()
        shutil.rmtree(self._own, ignore_errors=True)
        return self._make(step)

    def replicate(self, step: int) -> None:
        """Have this rank's files copied to another node while training goes on, once their checkpoint is committed."""
        self._copying = self._thread.submit(self._replicate, step)

    def settle(self) -> None:
        """Wait until nothing is being copied. Raises RankError: a rank could not be reached."""
        if self._copying is None:
            return
        copying, self._copying = self._copying, None
        wait_with_heartbeats([copying], self._moved)
        failure = copying.exception()
        self._world.agree(failure if isinstance(failure, Exception) else None, "copying a checkpoint to another node")

    def recover(self, step: int, shards: Sizes) -> dict[str, Path]:
        """Give ranks whose node has lost their copies of a step those that others keep for them.

        Args:
            step: of the checkpoint that is about to be read.
            shards: all of its files with tensors.

        Returns:
            Where copies are on this node, by the names of files.
        """
        held = self._world.collect(_sizes(self._of(step)))
        transfers = missing(self._nodes, held, shards)
        if transfers:
            working = self._thread.submit(self._move, step, transfers)
            wait_with_heartbeats([working], self._moved)
            failure = working.exception()
            self._world.agree(failure if isinstance(failure, Exception) else None, "getting copies from other nodes")
        return {path.name: path for path in self._directory.glob(f"rank-*/{self._of(step).name}/*")}

    def close(self) -> None:
        """Remove this rank's copies. The last call."""
        self.settle()
        self._thread.shutdown()
        shutil.rmtree(self._own, ignore_errors=True)

    def _of(self, step: int) -> Path:
        return self._own / f"step_{step:06d}"

    def _make(self, step: int) -> Path:
        """Make the directory of a step, unless that of the node is gone: its agent has ended, and nobody clears up."""
        made = self._of(step)
        with contextlib.suppress(OSError):
            for directory in (self._own, made):
                directory.mkdir(exist_ok=True)
        return made

    def _replicate(self, step: int) -> None:
        written = {name: size for name, size in _sizes(self._of(step)).items() if _writer(name) == self._world.rank}
        by_rank: list[Sizes] = [{}] * self._world.size
        dist.all_gather_object(by_rank, written, group=self._group)
        keepers = keepers_of(self._nodes)
        transfers = [
            Transfer(rank, keeper, name, size)
            for rank, (keeper, files) in enumerate(zip(keepers, by_rank, strict=True))
            if keeper is not None
            for name, size in sorted(files.items())
        ]
        self._move(step, transfers)

    def _move(self, step: int, transfers: Sequence[Transfer]) -> None:
        """Send and receive this rank's part of what all ranks move.

        Each sends in the order of the list, and receives in it: the first that is not over has both its ends waiting
        for it, so that they never wait in a circle.
        """
        mine = self._world.rank
        with ThreadPoolExecutor(1, "checkpoint-send") as thread:
            sending = thread.submit(self._send, step, [each for each in transfers if each.source == mine])
            for each in transfers:
                if each.target == mine:
                    self._receive(step, each)
            sending.result()

    def _send(self, step: int, transfers: Iterable[Transfer]) -> None:
        for each in transfers:
            with contextlib.ExitStack() as stack:
                file = None
                with contextlib.suppress(OSError):  # it gets something else, which its digest tells
                    file = stack.enter_context((self._of(step) / each.name).open("rb", buffering=0))
                for piece in _pieces(each.size):
                    if file is not None:
                        with contextlib.suppress(OSError):
                            file.readinto(piece.numpy().data)
                    dist.send(piece, each.target, group=self._group)
                    self._moved.bytes += len(piece)

    def _receive(self, step: int, transfer: Transfer) -> None:
        with CopyFile(self._make(step) / transfer.name) as file:
            for piece in _pieces(transfer.size):
                dist.recv(piece, transfer.source, group=self._group)
                file.write(piece.numpy())
                self._moved.bytes += len(piece)


def keepers_of(nodes: Sequence[str]) -> list[int | None]:
    """Name for each rank the rank of the next node that keeps its copies; None for all where there is one node.

    Args:
        nodes: of each rank.
    """
    by_node = defaultdict[str, list[int]](list)
    for rank, node in enumerate(nodes):
        by_node[node].append(rank)
    if len(by_node) == 1:
        return [None] * len(nodes)
    order = list(by_node)
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        after = by_node[order[(order.index(node) + 1) % len(order)]]
        found.append(after[by_node[node].index(rank) % len(after)])
    return found


def missing(nodes: Sequence[str], held: Sequence[Sizes], shards: Sizes) -> list[Transfer]:
    """List the files that are not on their writer's node, and that another node has.

    Args:
        nodes: of each rank.
        held: copies that each rank has.
        shards: files of the checkpoint. What has another size is no copy of it.
    """
    found = []
    for name, size in sorted(shards.items()):
        writer = _writer(name)
        holders = [rank for rank, files in enumerate(held) if files.get(name) == size]
        if writer is None or writer >= len(nodes) or not holders:
            continue
        if all(nodes[holder] != nodes[writer] for holder in holders):
            found.append(Transfer(holders[0], writer, name, size))
    return found


def _writer(name: str) -> int | None:
    """Which rank has written a file of this name."""
    match = _WRITER.fullmatch(name)
    return int(match[1]) if match else None


def _sizes(directory: Path) -> dict[str, int]:
    try:
        return {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}
    except OSError:
        return {}


def _pieces(size: int) -> Iterator[torch.Tensor]:
    """Yield room for each piece of a file of so many bytes: the same memory again and again."""
    room = torch.zeros(min(size, PIECE), dtype=torch.uint8)
    for start in range(0, size, PIECE):
        yield room[: min(PIECE, size - start)]
