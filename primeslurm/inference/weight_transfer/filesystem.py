"""Weight transfer by files: each worker of an engine reads a published policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from primeslurm.base import files
from primeslurm.inference.weight_transfer.layerwise import LayerwiseTransferEngine, PolicyError, some
from primeslurm.wire.weight_transfer.filesystem import MANIFEST, read_manifest
from primeslurm.wire.weight_transfer.messages import PolicyDirectory
from primeslurm.wire.weight_transfer.tensor_names import absent, layers_ahead

SEEN_S = 20.0
"""How long an announced policy is waited for. The trainer's node has written it, and directories are opened anew."""


class UnseenError(PolicyError):
    """Something of a policy is not there, or this node does not see it yet."""


@dataclass
class FilesystemInit(WeightTransferInitInfo):
    """The file system needs no set-up."""


class FilesystemTransferEngine(LayerwiseTransferEngine):
    """Reads a published policy from a shared file system; each worker takes the shards it needs."""

    init_info_cls = FilesystemInit
    update_info_cls = PolicyDirectory

    def init_transfer_engine(self, init_info: FilesystemInit) -> None:
        """Set nothing up: a file system is there."""

    def receive_weights(self, update_info: PolicyDirectory) -> None:
        """Check the policy as a whole, then load it.

        Raises:
            PolicyError: no manifest, another version, files missing or cut short, or tensors missing. Nothing has
                been loaded then.
        """
        paths = policy_files(Path(update_info.path), update_info.version)
        config = self.model_config.hf_text_config
        ahead = layers_ahead(config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0)
        expected = {name for name in tensor_names(self._model_files()) if not ahead.fullmatch(name)}
        lacking = absent(expected, tensor_names(paths))
        if self.has_tied_embeddings():
            lacking.discard("lm_head.weight")
        if lacking:
            raise PolicyError(f"{update_info.path}: lacks {len(lacking)} tensors of the model: {some(lacking)}")
        self.load(_tensors(paths))

    def _model_files(self) -> list[Path]:
        # Empty for a model that is not a directory; `finish_weight_update` still compares parameter by parameter.
        return files.listing(Path(self.model_config.model), "*.safetensors")


def policy_files(directory: Path, version: int) -> list[Path]:
    """List the safetensors files of a complete published policy.

    The trainer's node has announced it, and this node may see it a moment later: what is missing is waited for.

    Raises:
        PolicyError: there is no manifest, it is of another version, or files are missing or cut short.
        OSError: it cannot be read.
    """
    failure: UnseenError | None = None

    def look() -> list[Path] | None:
        nonlocal failure
        try:
            return _policy_files(directory, version)
        except UnseenError as error:
            failure = error
            return None

    found = files.until_seen(look, directory.parent, directory, within_s=SEEN_S)
    if found is None:
        assert failure is not None
        raise failure
    return found


def _policy_files(directory: Path, version: int) -> list[Path]:
    manifest = read_manifest(directory)
    if manifest is None:
        raise UnseenError(f"{directory}: no readable {MANIFEST}: not a complete policy")
    if manifest.version != version:
        raise PolicyError(f"{directory}: holds version {manifest.version}, asked for {version}")
    entries = [entry for entry in manifest.files if entry.name.endswith(".safetensors")]
    if not entries:
        raise PolicyError(f"{directory}: its {MANIFEST} names no safetensors file")
    for entry in entries:
        path = directory / entry.name
        found = files.status(path)
        size = found.st_size if found else None
        if size != entry.bytes:
            raise UnseenError(f"{path}: {entry.bytes} bytes in the manifest, found {size}")
    return [directory / entry.name for entry in entries]


def tensor_names(paths: list[Path]) -> set[str]:
    """Read the names of all tensors in safetensors files (the headers only)."""
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
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                yield name, files.retrying(path, partial(handle.get_tensor, name))
