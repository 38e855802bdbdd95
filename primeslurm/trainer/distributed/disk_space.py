"""Retries for writes that all ranks do together, while the file system is full, read-only or unreachable."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from primeslurm.base import files
from primeslurm.base.durable import RESERVE_BYTES, RETRY_S, free_bytes, is_unwritable, reserve_released, warn
from primeslurm.trainer.distributed.world import RankError, World

T = TypeVar("T")
# Attempts to write to a file system that is unreachable
MAX_ATTEMPTS = 5
_UNREACHABLE = (errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.EREMOTEIO)
_UNREACHABLE_TEXT = re.compile("|".join(re.escape(os.strerror(number)) for number in _UNREACHABLE))


def is_disk_full(world: World, run_dir: Path, error: RankError) -> bool:
    """Return whether a write failed because the file system is full or read-only. Rank 0 decides for all ranks."""
    # Some libraries hide the errno (torch's zip writer does), so little free space counts as the cause, too.
    free = free_bytes(run_dir)
    return bool(world.decide(int(is_unwritable(error) or (free is not None and free < RESERVE_BYTES))))


def is_unreachable(world: World, error: RankError) -> bool:
    """Return whether a write failed because a node lost the file system. Rank 0 decides for all ranks."""
    return bool(world.decide(int(bool(_UNREACHABLE_TEXT.search(str(error))))))


def retry_while_full(
    world: World, run_dir: Path, write: Callable[[], T], *partial: Path, pause_s: float = RETRY_S
) -> T:
    """Call `write` until it succeeds. Retries a full disk forever, an unreachable one MAX_ATTEMPTS times.

    A collective. Directories `partial` are deleted after a failed attempt, to free their space. Raises RankError if the
    write failed for another reason, or too often.
    """
    # `durable` handles a full disk for single files. Here libraries write the files (DCP, safetensors), and all ranks
    # must come to the same decision, so the wait is repeated here.
    failed_attempts = 0
    while True:
        # After the reserve was released, the remaining space belongs to records.
        while world.decide(int(reserve_released(run_dir))):
            files.pause(pause_s)
        try:
            with files.keeping_reserve():
                return write()
        except RankError as error:
            full = is_disk_full(world, run_dir, error)
            failed_attempts += not full
            if not full and not (is_unreachable(world, error) and failed_attempts < MAX_ATTEMPTS):
                raise
            warn(error)
            if world.is_main:
                for directory in partial:
                    files.remove_tree(directory, ignore_errors=True)
            files.pause(pause_s)
