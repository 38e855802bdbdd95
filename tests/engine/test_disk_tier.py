"""The bounded disk tier: which files it deletes, and which it leaves alone."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from primeslurm.inference.disk_tier import BlockFiles

pytestmark = pytest.mark.engine
SIZE = 64


def store(files: BlockFiles, *paths: Path) -> None:
    """Write the name of each file into it."""

    def write(chosen: Sequence[int]) -> None:
        for i in chosen:
            paths[i].write_bytes(paths[i].name.encode().ljust(SIZE))

    files.write([str(path) for path in paths], write)


def test_oldest_blocks_are_deleted_and_read_blocks_stay(tmp_path: Path) -> None:
    own, other = tmp_path / "8000", tmp_path / "8001"
    own.mkdir()
    other.mkdir()
    store(BlockFiles(other, SIZE, 10 * SIZE), *(other / f"{i}.bin" for i in range(10)))
    files = BlockFiles(own, SIZE, 3 * SIZE + 5)
    a, b, c, d, e = (own / f"{name}.bin" for name in "abcde")
    store(files, a, b, c)
    files.used([str(a)])
    store(files, d)
    assert sorted(own.iterdir()) == [a, c, d]
    store(files, a, e)  # `a` is there already, so only one file makes room
    assert sorted(own.iterdir()) == [a, d, e]
    assert len(list(other.iterdir())) == 10


def test_a_restarted_engine_counts_the_files_of_the_process_before_it(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.bin").write_bytes(b"x" * SIZE)
        os.utime(tmp_path / f"{i}.bin", (i, i))
    BlockFiles(tmp_path, SIZE, 2 * SIZE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.bin", "4.bin"]


def test_a_tier_smaller_than_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="64 bytes, but the disk tier has only 63"):
        BlockFiles(tmp_path, SIZE, SIZE - 1)


def test_parallel_stores_stay_below_the_bound_and_keep_contents(tmp_path: Path) -> None:
    files, limit, most = BlockFiles(tmp_path, SIZE, 8 * SIZE), 8, []

    def work(seed: int) -> None:
        pick = random.Random(seed)
        for _ in range(100):
            store(files, *(tmp_path / f"{pick.randrange(40)}.bin" for _ in range(3)))
            most.append(len(list(tmp_path.iterdir())))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert max(most) <= limit
    left = list(tmp_path.iterdir())
    assert left and all(path.read_bytes() == path.name.encode().ljust(SIZE) for path in left)
