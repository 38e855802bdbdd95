"""Published policies on the shared file system: `weights/v000012/`, complete once MANIFEST.json exists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from primeslurm.base import durable, files
from primeslurm.wire.stored import checkpoints, manifest
from primeslurm.wire.stored.manifest import FileRecord

MANIFEST = "MANIFEST.json"
# Longest wait until this node sees a policy that another node has written [s].
SEEN_S = 20.0
_NAME = re.compile(r"^v(\d{6,})$")


class WeightManifest(msgspec.Struct, frozen=True):
    """A complete published policy.

    Layout "hf" is safetensors with Hugging Face names, "adapter" a LoRA adapter in PEFT format, and "delta" the
    difference from version `base`, whose layout is "hf" (see `deltas`).
    """

    version: int
    layout: str
    dtype: str
    files: list[FileRecord]
    base: int | None = None


def version_dir(run_dir: Path, version: int) -> Path:
    return run_dir / "weights" / f"v{version:06d}"


def complete(
    directory: Path,
    version: int,
    dtype: str,
    described: Sequence[FileRecord] = (),
    layout: str = "hf",
    base: int | None = None,
) -> WeightManifest:
    """Write the manifest of a policy directory, which makes it valid. Files in `described` are not read again."""
    recorded = {MANIFEST, *(record.name for record in described)}
    others = [path for path in files.listing(directory) if path.name not in recorded and not path.name.startswith(".")]
    more = manifest.describe(directory, [path for path in others if files.is_file(path)])
    records = sorted([*described, *more], key=lambda record: record.name)
    value = WeightManifest(version=version, layout=layout, dtype=dtype, files=records, base=base)
    manifest.write(directory / MANIFEST, value)
    return value


def read_manifest(directory: Path) -> WeightManifest | None:
    return manifest.read(directory / MANIFEST, WeightManifest)


def base_of(directory: Path) -> tuple[Path, int] | None:
    """Return the directory and version of a delta's base. None: the policy in `directory` is whole."""
    manifest = read_manifest(directory)
    if manifest is None or manifest.base is None:
        return None
    return directory.parent / version_dir(Path(), manifest.base).name, manifest.base


def read_ahead(directory: Path) -> None:
    """Read the files of a published policy into this node's page cache. Wait up to `SEEN_S` until they are visible."""
    manifest = files.until_seen(lambda: read_manifest(directory), directory.parent, directory, within_s=SEEN_S)
    for file in manifest.files if manifest else ():
        files.read_bytes(directory / file.name)


def damage(directory: Path) -> list[str]:
    """Read a published policy and return the texts of all differences from its manifest."""
    value = read_manifest(directory)
    return manifest.differing(directory, value.files) if value else [f"{directory}: no readable {MANIFEST}"]


def published(run_dir: Path) -> list[int]:
    return [version for version in _directories(run_dir) if _is_complete(run_dir, version)]


def _is_complete(run_dir: Path, version: int) -> bool:
    return files.is_file(version_dir(run_dir, version) / MANIFEST)


def _directories(run_dir: Path) -> list[int]:
    return sorted(int(match[1]) for path in files.listing(run_dir / "weights") if (match := _NAME.match(path.name)))


def prune_behind(run_dir: Path, keep: int, version: int) -> list[int]:
    """Call `prune`, but keep `version`, the current policy, and the versions of checkpoints, which a resume needs."""
    return prune(run_dir, keep, {version, *checkpoints.committed(run_dir)})


def prune(run_dir: Path, keep: int, needed: set[int]) -> list[int]:
    """Delete published versions beyond the newest `keep`, but none in `needed`, and incomplete versions.

    The bases of remaining deltas remain, too. Versions appear complete, so an incomplete one is left from an
    interrupted deletion. Returns the deleted versions.
    """
    versions = published(run_dir)
    keep_versions = {*versions[-keep:], *needed}
    manifests = [read_manifest(version_dir(run_dir, version)) for version in keep_versions]
    keep_versions |= {value.base for value in manifests if value is not None and value.base is not None}
    obsolete = [version for version in _directories(run_dir) if version not in keep_versions]
    if any(version not in versions and _is_complete(run_dir, version) for version in obsolete):
        return []  # this node's view was outdated, so another version that it does not see may be needed
    for version in obsolete:
        directory = version_dir(run_dir, version)
        durable.remove(directory / MANIFEST)  # first: a half-deleted version must not look complete
        files.remove_tree(directory, ignore_errors=True)
    return obsolete
