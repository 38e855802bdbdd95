"""Published policies on a shared file system: `weights/v000012/`, complete only with MANIFEST.json, written last."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from primeslurm.wire import manifest
from primeslurm.wire.manifest import FileRecord

MANIFEST = "MANIFEST.json"
FP8_BLOCK = 128
"""Rows and columns of a block of an FP8 weight, which share a scale."""
FP8_SCALE = "_scale_inv"
"""What follows the name of an FP8 weight in the name of its scales."""
_NAME = re.compile(r"^v(\d{6,})$")
_STACK = re.compile(r"(.+\.experts)\.(?:gate_up|(down))_proj")


class WeightManifest(msgspec.Struct, frozen=True):
    """A complete published policy. `layout` "hf" = safetensors under Hugging Face names."""

    version: int
    layout: str
    dtype: str
    files: list[FileRecord]


def layers_ahead(layers: int, ahead: int) -> re.Pattern[str]:
    """Names of a checkpoint's tensors for tokens further ahead: `ahead` layers beyond its `layers`, or a module `mtp`.

    They draft for speculative decoding; neither training nor an engine without drafts reads them.
    """
    numbers = "|".join(str(layers + index) for index in range(ahead))
    return re.compile(rf"(model\.layers\.({numbers})|mtp)\..*")


def absent(expected: Collection[str], found: Collection[str]) -> set[str]:
    """Names of `expected` that are not `found`. What one checkpoint stacks, another may hold expert by expert."""
    return {name for name in expected if name not in found and not _one_by_one(name, found)}


def _one_by_one(name: str, found: Collection[str]) -> bool:
    """Whether the first expert of a stack is there by itself."""
    stack = _STACK.fullmatch(name)
    parts = () if stack is None else ("down",) if stack[2] else ("gate", "up")
    return stack is not None and all(f"{stack[1]}.0.{part}_proj.weight" in found for part in parts)


def version_dir(run_dir: Path, version: int) -> Path:
    """Where version `version` is published."""
    return run_dir / "weights" / f"v{version:06d}"


def complete(directory: Path, version: int, dtype: str, described: Sequence[FileRecord] = ()) -> WeightManifest:
    """Describe every file of `directory` in a manifest: from here on the version exists.

    Args:
        described: records of files that their writers made; only the others are read.
    """
    done = {MANIFEST, *(record.name for record in described)}
    files = [p for p in directory.iterdir() if p.is_file() and p.name not in done and not p.name.startswith(".")]
    records = sorted([*described, *manifest.describe(directory, files)], key=lambda record: record.name)
    value = WeightManifest(version=version, layout="hf", dtype=dtype, files=records)
    manifest.write(directory / MANIFEST, value)
    return value


def read_manifest(directory: Path) -> WeightManifest | None:
    """The manifest, or None if the directory is not a complete policy."""
    return manifest.read(directory / MANIFEST, WeightManifest)


def damage(directory: Path) -> list[str]:
    """What is wrong with a published policy, in words; empty if every file matches its digest."""
    value = read_manifest(directory)
    return manifest.differing(directory, value.files) if value else [f"{directory}: no readable {MANIFEST}"]


def published(run_dir: Path) -> list[int]:
    """All complete versions, ascending."""
    root = run_dir / "weights"
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.match(path.name))]
    return sorted(version for version, path in found if (path / MANIFEST).is_file())


def prune(run_dir: Path, keep: int, needed: set[int]) -> list[int]:
    """Delete published versions beyond the newest `keep`, but never one in `needed`. Returns what was deleted."""
    versions = published(run_dir)
    doomed = [v for v in versions[:-keep] if v not in needed]
    for version in doomed:
        directory = version_dir(run_dir, version)
        (directory / MANIFEST).unlink(missing_ok=True)  # first: a half-deleted version must not look complete
        shutil.rmtree(directory, ignore_errors=True)
    return doomed
