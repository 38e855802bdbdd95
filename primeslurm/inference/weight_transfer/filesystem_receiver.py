"""Weight updates from files: each engine worker reads a published policy from the shared file system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from primeslurm.base import files
from primeslurm.inference.weight_transfer.layerwise import LayerwiseTransferEngine, PolicyError, first_three
from primeslurm.wire.weight_transfer.filesystem import MANIFEST, SEEN_S, read_manifest
from primeslurm.wire.weight_transfer.messages import PolicyDirectory
from primeslurm.wire.weight_transfer.tensor_names import absent


class UnseenError(PolicyError):
    """A file of a policy is missing, or not yet visible on this node."""


@dataclass
class FilesystemInit(WeightTransferInitInfo):
    """Empty, because the file system needs no set-up."""


class FilesystemTransferEngine(LayerwiseTransferEngine):
    """Reads a published policy; each worker loads the shards that it needs."""

    init_info_cls = FilesystemInit
    update_info_cls = PolicyDirectory

    def init_transfer_engine(self, init_info: FilesystemInit) -> None:
        """Do nothing."""

    def receive_weights(self, update_info: PolicyDirectory) -> None:
        """Load a policy. Raise PolicyError if it is incomplete or of another version; nothing has been loaded then."""
        paths = policy_files(Path(update_info.path), update_info.version)
        ahead = self.draft_names()
        # There are none for a hub id. `finish_weight_update` still checks every parameter.
        model_files = files.listing(Path(self.model_config.model), "*.safetensors")
        expected = {name for name in tensor_names(model_files) if not ahead.fullmatch(name)}
        lacking = absent(expected, tensor_names(paths))
        if self.has_tied_embeddings():
            lacking.discard("lm_head.weight")
        if lacking:
            raise PolicyError(f"{update_info.path}: lacks {len(lacking)} tensors of the model: {first_three(lacking)}")
        self.load(_tensors(paths))


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
