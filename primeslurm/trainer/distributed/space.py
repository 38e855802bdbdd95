"""What all ranks write together waits while the file system is full or read-only."""

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
MOST_TRIES = 5
"""How often something is written again that was lost because the file system was away, as after a failed flush."""
_NUMBERS = (errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.EREMOTEIO)
_AWAY = re.compile("|".join(re.escape(os.strerror(number)) for number in _NUMBERS))


def for_want_of_space(world: World, run_dir: Path, error: RankError) -> bool:
    """Whether something failed because the file system is full or read-only; every rank is told the same.

    Not all libraries say why they could not write (torch's zip files do not): too little that is free says so, too.
    """
    free = free_bytes(run_dir)
    return bool(world.decide(int(is_unwritable(error) or (free is not None and free < RESERVE_BYTES))))


def is_away(world: World, error: RankError) -> bool:
    """Whether something failed because a rank's node did not reach the file system; every rank is told the same."""
    return bool(world.decide(int(bool(_AWAY.search(str(error))))))


def waiting_for_space(
    world: World, run_dir: Path, write: Callable[[], T], *partial: Path, pause_s: float = RETRY_S
) -> T:
    """Write until the file system takes it; five times at most if it is not full. All ranks call this together.

    Args:
        world: the ranks.
        run_dir: in whose file system they write.
        write: what they do; it begins anew each time.
        partial: directories that a failed try leaves, and that only take space then.
        pause_s: between two tries.

    Raises:
        RankError: it failed for another reason.
    """
    # `durable` handles a full disk for single files. Here libraries write the files (DCP, safetensors), and all ranks
    # must come to the same decision, so the wait is repeated here.
    lost = 0
    while True:
        while world.decide(int(reserve_released(run_dir))):  # what is left is for records
            files.pause(pause_s)
        try:
            with files.keeping_reserve():
                return write()
        except RankError as error:
            full = for_want_of_space(world, run_dir, error)
            lost += not full
            if not full and not (is_away(world, error) and lost < MOST_TRIES):
                raise
            warn(error)
            if world.is_main:
                for directory in partial:
                    files.remove_tree(directory, ignore_errors=True)
            files.pause(pause_s)
