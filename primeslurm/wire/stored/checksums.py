"""Digests that detect accidental damage of files. They do not protect against attackers.

A user who can change a file of a run can also change its unsigned record. A cryptographic digest would cost about
twenty times the CPU time and keep nobody out.

- XXH3 with 128 bits is for terabytes: 23 GiB/s on one core, where blake2b has 1.2 and SHA-256 with SHA-NI 1.7. It is
  recorded as `xxh3:` and 32 hex digits; `xxh128sum` prints the same digits.
- blake2b-128 is for small files, because Python includes it. It is recorded as 32 hex digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from primeslurm.base import files

if TYPE_CHECKING:
    import xxhash

XXH3 = "xxh3:"
_READ_BYTES = 1 << 22


def hasher() -> xxhash.xxh3_128:
    import xxhash  # the base install has no xxhash: only processes that train or convert checkpoints need it

    return xxhash.xxh3_128()


def same(path: Path, digest: str) -> bool:
    """Return whether a file has this digest, given in either form. Raise OSError if it cannot be read."""
    return (of(path) if digest.startswith(XXH3) else files.digest(path)) == digest


def of(path: Path) -> str:
    """Return the XXH3 digest of a file. Raise OSError if it cannot be read."""

    def read(handle: Any) -> str:
        state, buffer = hasher(), bytearray(_READ_BYTES)
        while count := handle.readinto(buffer):
            state.update(memoryview(buffer)[:count])
        return XXH3 + state.hexdigest()

    return files.reading(path, read)
