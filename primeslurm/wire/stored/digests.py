"""Digests of files, and of parts of them while they are written: against accidental damage, not against attackers.

Whoever can change a file of a run can change the record of it, too, which nobody signs: a cryptographic digest would
cost twenty times the CPU seconds and keep nobody out.

- XXH3, 128 bits, for terabytes: 23 GiB/s on a core, where blake2b has 1.2 and SHA-256 with SHA-NI 1.7. That a damaged
  part keeps its digest has a chance of 2^-128. In records as `xxh3:` and 32 hex digits, which `xxh128sum` also prints.
- blake2b-128 for small files, and for all of release 0.1.0: Python alone has it. 32 hex digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from primeslurm.base import files

if TYPE_CHECKING:
    import xxhash

XXH3 = "xxh3:"
_CHUNK = 1 << 22


def hasher() -> xxhash.xxh3_128:
    """Make an XXH3 hasher. The base installation has none: only what trains or converts checkpoints needs it."""
    import xxhash

    return xxhash.xxh3_128()


def same(path: Path, digest: str) -> bool:
    """Whether a file has this digest, in whichever of the two forms. Raises OSError."""
    if not digest.startswith(XXH3):
        return files.digest(path) == digest

    def read(handle: Any) -> str:
        found, chunk = hasher(), bytearray(_CHUNK)
        while count := handle.readinto(chunk):
            found.update(memoryview(chunk)[:count])
        return XXH3 + found.hexdigest()

    return files.reading(path, read) == digest
