"""Weight updates from files: each engine worker reads a published policy from the shared file system.

The policy is a whole version, or a base and a delta. Either way, all tensors are loaded, so it does not matter which
versions the engine had before.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from primeslurm.base import files
from primeslurm.inference.weight_receivers.layerwise import LayerwiseTransferEngine, PolicyError, first_three
from primeslurm.wire.weight_transfer import deltas
from primeslurm.wire.weight_transfer.filesystem import MANIFEST, SEEN_S, base_of, read_manifest
from primeslurm.wire.weight_transfer.messages import PolicyDirectory
from primeslurm.wire.weight_transfer.tensor_names import absent


class UnseenError(PolicyError):
    """A file of a policy is missing, or not yet visible on this node."""


@dataclass
class FilesystemInit(WeightTransferInitInfo):
    """vLLM's set-up message of this backend. Empty, because the file system needs no set-up."""


class FilesystemTransferEngine(LayerwiseTransferEngine):
    """vLLM weight-transfer backend that reads a published policy. Each worker loads the shards that it needs."""

    init_info_cls = FilesystemInit
    update_info_cls = PolicyDirectory

    def init_transfer_engine(self, init_info: FilesystemInit) -> None:
        """Do nothing."""

    def receive_weights(self, update_info: PolicyDirectory) -> None:
        """Load a policy. Raise PolicyError if it is incomplete or of another version; nothing has been loaded then."""
        directory = Path(update_info.path)
        paths, delta_paths = policy_files(directory, update_info.version), []
        if (base := base_of(directory)) is not None:
            paths, delta_paths = policy_files(*base), paths
        ahead = self.draft_names()
        # There are none for a hub id. `finish_weight_update` still checks every parameter.
        model_files = files.listing(Path(self.model_config.model), "*.safetensors")
        expected = {name for name in tensor_names(model_files) if not ahead.fullmatch(name)}
        lacking = absent(expected, tensor_names(paths))
        if self.has_tied_embeddings():
            lacking.discard("lm_head.weight")
        if lacking:
            raise PolicyError(f"{update_info.path}: lacks {len(lacking)} tensors of the model: {first_three(lacking)}")
        self.load(restored(paths, delta_paths) if delta_paths else _tensors(paths))


def policy_files(directory: Path, version: int) -> list[Path]:
    """Return the safetensors files of a published policy. Wait up to `SEEN_S` until this node sees all of them.

    Raise PolicyError if there is no manifest, it has another version, or files are missing or truncated, and OSError if
    the directory cannot be read.
    """
    failure: UnseenError | None = None

    def look() -> list[Path] | None:
        nonlocal failure
        try:
            return _policy_files(directory, version)
        except UnseenError as error:
            failure = error
            return None

    paths = files.until_seen(look, directory.parent, directory, within_s=SEEN_S)
    if paths is None:
        assert failure is not None
        raise failure
    return paths


def _policy_files(directory: Path, version: int) -> list[Path]:
    manifest = read_manifest(directory)
    if manifest is None:
        raise UnseenError(f"{directory}: no readable {MANIFEST}, so the policy is incomplete")
    if manifest.version != version:
        raise PolicyError(f"{directory}: has version {manifest.version}, expected {version}")
    entries = [entry for entry in manifest.files if entry.name.endswith(".safetensors")]
    if not entries:
        raise PolicyError(f"{directory}: its {MANIFEST} names no safetensors file")
    for entry in entries:
        path = directory / entry.name
        status = files.status(path)
        size = status.st_size if status else None
        if size != entry.bytes:
            raise UnseenError(f"{path}: has {size} bytes, expected {entry.bytes} as in the manifest")
    return [directory / entry.name for entry in entries]


def tensor_names(paths: list[Path]) -> set[str]:
    """Return the names of all tensors in safetensors files. This reads only the headers."""
    names: set[str] = set()
    for path in paths:
        names.update(files.retrying(path, partial(_keys, path)))
    return names


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as handle:
        return list(handle.keys())


def _tensors(paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with files.retrying(path, partial(safe_open, path, framework="pt")) as handle:
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                yield name, files.retrying(path, partial(handle.get_tensor, name))


def restored(base_paths: list[Path], delta_paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a version from its base and its delta, layer by layer.

    Raises PolicyError if a tensor is not as published.
    """
    with contextlib.ExitStack() as stack:
        base, _ = _opened(base_paths, stack)
        delta, digests = _opened(delta_paths, stack)
        # vLLM holds the tensors of a module until it has all. These are copies in memory, unlike those of a whole
        # version, and files of different ranks have parts of the same layer.
        for name in sorted(base, key=_by_layer):
            stored = {key: _read(delta, key) for key in deltas.keys(name) if key in delta}
            try:
                yield name, deltas.restored(name, _read(base, name), stored, digests.get(name))
            except deltas.DeltaError as error:
                raise PolicyError(f"{delta_paths[0].parent}: {error}") from error


def _opened(paths: list[Path], stack: contextlib.ExitStack) -> tuple[dict[str, tuple[Path, Any]], dict[str, str]]:
    """Return the file of each tensor with its open handle, and the metadata of all files."""
    places: dict[str, tuple[Path, Any]] = {}
    metadata: dict[str, str] = {}
    for path in paths:
        handle = stack.enter_context(files.retrying(path, partial(safe_open, path, framework="pt")))
        places |= dict.fromkeys(handle.keys(), (path, handle))
        metadata |= handle.metadata() or {}  # also of a file whose tensors are all unchanged, and so has none
    return places, metadata


def _read(places: dict[str, tuple[Path, Any]], name: str) -> torch.Tensor:
    path, handle = places[name]
    return files.retrying(path, partial(handle.get_tensor, name))


def _by_layer(name: str) -> str:
    """Return a sort key for tensor names, by which layer 2 precedes layer 10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(6), name)
