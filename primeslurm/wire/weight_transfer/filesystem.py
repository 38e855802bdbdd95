"""Published policies on a shared file system: `weights/v000012/`, complete only with MANIFEST.json, written last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from primeslurm.base import durable, files
from primeslurm.wire.stored import checkpoints, manifest
from primeslurm.wire.stored.manifest import FileRecord

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"^v(\d{6,})$")


class WeightManifest(msgspec.Struct, frozen=True):
    """A complete published policy. `layout` "hf" = safetensors under Hugging Face names."""

    version: int
    layout: str
    dtype: str
    files: list[FileRecord]


def version_dir(run_dir: Path, version: int) -> Path:
    """Return the directory that version `version` is published in."""
    return run_dir / "weights" / f"v{version:06d}"


def complete(directory: Path, version: int, dtype: str, described: Sequence[FileRecord] = ()) -> WeightManifest:
    """Describe every file of `directory` in a manifest: from here on the version exists.

    Args:
        directory: of the version, with all its files.
        version: its number.
        dtype: of its weights, as in torch's names.
        described: records of files that their writers made; only the others are read.
    """
    done = {MANIFEST, *(record.name for record in described)}
    rest = [path for path in files.listing(directory) if path.name not in done and not path.name.startswith(".")]
    more = manifest.describe(directory, [path for path in rest if files.is_file(path)])
    records = sorted([*described, *more], key=lambda record: record.name)
    value = WeightManifest(version=version, layout="hf", dtype=dtype, files=records)
    manifest.write(directory / MANIFEST, value)
    return value


def read_manifest(directory: Path) -> WeightManifest | None:
    """Read the manifest; None if the directory is not a complete policy."""
    return manifest.read(directory / MANIFEST, WeightManifest)


def damage(directory: Path) -> list[str]:
    """Compare a published policy with its manifest.

    Returns:
        What is wrong, in words; empty if every file matches its digest.
    """
    value = read_manifest(directory)
    return manifest.differing(directory, value.files) if value else [f"{directory}: no readable {MANIFEST}"]


def published(run_dir: Path) -> list[int]:
    """List all complete versions, ascending."""
    return [version for version in _directories(run_dir) if _is_complete(run_dir, version)]


def _is_complete(run_dir: Path, version: int) -> bool:
    return files.is_file(version_dir(run_dir, version) / MANIFEST)


def _directories(run_dir: Path) -> list[int]:
    """The versions that have a directory, complete or not, ascending."""
    return sorted(int(match[1]) for path in files.listing(run_dir / "weights") if (match := _NAME.match(path.name)))


def prune_behind(run_dir: Path, keep: int, version: int) -> list[int]:
    """As `prune`, once `version` is the policy: needed are it, and those of checkpoints, which a resume begins with."""
    return prune(run_dir, keep, {version, *checkpoints.committed(run_dir)})


def prune(run_dir: Path, keep: int, needed: set[int]) -> list[int]:
    """Delete published versions beyond the newest `keep`, but never one in `needed`.

    Also what is left of others: versions appear complete, so one that is not was being deleted when its process died.

    Returns:
        The versions that were deleted, ascending.
    """
    whole = published(run_dir)
    kept = {*whole[-keep:], *needed}
    doomed = [version for version in _directories(run_dir) if version not in kept]
    if any(version not in whole and _is_complete(run_dir, version) for version in doomed):
        return []  # this node did not see one that is complete: what else it does not see may be needed
    for version in doomed:
        directory = version_dir(run_dir, version)
        durable.remove(directory / MANIFEST)  # first: a half-deleted version must not look complete
        files.remove_tree(directory, ignore_errors=True)
    return doomed
