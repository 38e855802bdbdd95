"""A compressing file system, so that checkpoints of hundreds of GB can really be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DESCRIPTION = "btrfs with zstd:1 in a sparse image: all is written, flushed and read, a 28th of it reaches the disk"
_OPTIONS = "loop,noatime,compress-force=zstd:1"


@contextmanager
def compressed_disk(directory: Path, size: int) -> Iterator[Path]:
    """Mount a compressing btrfs while the block runs.

    Args:
        directory: place of its image, which is removed at the end.
        size: size of the sparse image [bytes].

    Yields:
        Its mount point.
    """
    if os.getuid() or not shutil.which("mkfs.btrfs"):
        sys.exit("error: a file system is mounted for this: run it as root, with mkfs.btrfs (Debian: btrfs-progs)")
    image, mounted = directory / "checkpoints.img", directory / "mounted"
    mounted.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.btrfs", "-q", "-K", str(image)], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["mount", "-o", _OPTIONS, str(image), str(mounted)], check=True)
        try:
            yield mounted
        finally:
            subprocess.run(["umount", str(mounted)], check=True)
    finally:
        image.unlink(missing_ok=True)


def allocated(directory: Path) -> int:
    """Return the bytes that the image in `directory` takes on the real disk."""
    return (directory / "checkpoints.img").stat().st_blocks * 512
