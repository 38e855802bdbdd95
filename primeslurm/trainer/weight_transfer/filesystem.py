"""Publish a policy: Hugging Face safetensors in a directory that appears complete or not at all.

Every rank writes what it hands on (`export.parts`), side by side with the others; no rank holds the model. Engines are
given each version (`FilesystemTransfer`), or the run keeps the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as partial_of
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from primeslurm.base import durable, files
from primeslurm.records.reserve import until_written
from primeslurm.trainer.distributed.disk_space import retry_while_full
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weights import model_directory, peft
from primeslurm.trainer.weights.export import Encoding, parts
from primeslurm.wire.link.trainer_link import TrainerLink
from primeslurm.wire.stored import manifest
from primeslurm.wire.stored.manifest import FileRecord
from primeslurm.wire.weight_transfer import filesystem, tensor_names

FILE_BYTES = 2 * 2**30
"""A rank begins a new file when one has reached this size: so much of its share is in host memory at once."""


class Publisher:
    """Writes versions of a policy below `<run>/weights`. All ranks call each method together.

    Args:
        encoding: of the published tensors.
        keep: how many of the newest versions stay; so does every version that a committed checkpoint needs.
    """

    def __init__(self, policy: PolicyModel, run_dir: Path, encoding: Encoding, keep: int, world: World) -> None:
        self._policy = policy
        self._run_dir = run_dir
        self._encoding = encoding
        self._keep = keep
        self._world = world

    def publish(self, version: int) -> Path:
        """Write the policy as `version` and return its directory. A full or read-only disk is waited for.

        Raises:
            RankError: a rank could not write; nothing is published, and earlier versions are intact.
        """
        final = filesystem.version_dir(self._run_dir, version)
        partial = final.with_name(f".{final.name}.partial")
        return retry_while_full(self._world, self._run_dir, lambda: self._publish(version, partial, final), partial)

    def _publish(self, version: int, partial: Path, final: Path) -> Path:
        self._world.agree(
            _attempt(lambda: durable.make_anew(partial)) if self._world.is_main else None, f"publishing v{version}"
        )
        share = _Share(partial, self._world.rank)
        self._write(share)
        self._world.agree(share.failure, f"publishing v{version}")
        written = self._world.collect(_Written(share.index, share.records, share.size))
        saves_adapter = self._policy.lora is not None and self._policy.lora.save_adapter
        adapter = peft.tensors(self._policy, self._encoding.dtype) if saves_adapter else {}
        failure = None
        if self._world.is_main:
            if self._policy.lora is not None and adapter:
                lora = self._policy.lora
                write = partial_of(peft.write, partial / "adapter", adapter, lora, self._policy.source)
                failure = _attempt(lambda: files.retrying(partial, write))
            failure = failure or _attempt(lambda: self._complete(partial, final, version, written))
        self._world.agree(failure, f"publishing v{version}")
        return final

    def flush(self, version: int) -> None:
        """Have a published version on disk: it outlives the attempt. Nothing happens if it was not published.

        Engines need not wait for it, and a version whose step is undone if the power goes need not be flushed.

        Raises:
            RankError: a rank could not flush its files.
        """
        directory = filesystem.version_dir(self._run_dir, version)
        self._world.agree(_attempt(lambda: _flush(directory, self._world.rank)), f"flushing v{version}")

    def discard_after(self, version: int) -> None:
        """Delete versions newer than `version`, which an earlier attempt made after its last commit, and prune."""
        if self._world.is_main:
            for newer in filesystem.published(self._run_dir):
                if newer > version:
                    until_written(partial_of(_remove, filesystem.version_dir(self._run_dir, newer)))
            until_written(lambda: filesystem.prune_behind(self._run_dir, self._keep, version))
        self._world.barrier()

    def is_sound(self, version: int) -> bool:
        """Whether `version` is published and undamaged."""
        directory = filesystem.version_dir(self._run_dir, version)
        return bool(self._world.decide(int(self._world.is_main and not filesystem.damage(directory))))

    def _write(self, share: _Share) -> None:
        """Layer by layer. A rank that cannot write still gathers along."""
        for layer in parts(self._policy, self._encoding.gathered, self._world):
            for part in layer:
                whole = part.whole()
                if part.mine:
                    share.add(self._encoding.encode(part.name, whole))
        share.flush()

    def _complete(self, partial: Path, final: Path, version: int, written: list[_Written]) -> None:
        index = {name: file for of_rank in written for name, file in of_rank.index.items()}
        self._check(index, sum(len(of_rank.index) for of_rank in written))
        encoding, total_size = self._encoding, sum(of_rank.size for of_rank in written)
        quantization = encoding.quantization(set(index))
        companions = (self._policy.source, partial, index, total_size, encoding.dtype_name, quantization)
        files.retrying(partial, lambda: model_directory.write_companions(*companions))
        records = [record for of_rank in written for record in of_rank.records]
        filesystem.complete(partial, version, encoding.dtype_name, records)
        _remove(final)
        files.rename(partial, final)
        filesystem.prune_behind(self._run_dir, self._keep, version)

    def _check(self, index: dict[str, str], written: int) -> None:
        names = {name for name in index if not name.endswith(tensor_names.FP8_SCALE)}
        if names != self._policy.hf_names:
            raise RuntimeError(f"export and model differ in {sorted(names ^ self._policy.hf_names)[:5]}")
        if written != len(index):
            raise RuntimeError(f"{written - len(index)} tensors were written by more than one rank")


class FilesystemTransfer:
    """Publishes every version; engines read it, whenever they come."""

    def __init__(self, publisher: Publisher, run_dir: Path, model: str, link: TrainerLink, world: World) -> None:
        self._publisher = publisher
        self._run_dir = run_dir
        self._model = model
        self._link = link
        self._world = world
        self._announced = 0
        """Engines may read any version up to this one: it stays as it is, also when its step is repeated."""

    def resume(self, version: int) -> None:
        """Publish `version` again only if its files are gone or damaged."""
        if version and not self._publisher.is_sound(version):
            self._publisher.publish(version)
            self._publisher.flush(version)
        self._announce(version, str(filesystem.version_dir(self._run_dir, version)) if version else self._model)
        self._publisher.discard_after(self._announced)

    def transfer(self, version: int) -> float:
        """Publish the version, then announce it."""
        if version > self._announced:
            self._announce(version, str(self._publisher.publish(version)))
        return 0.0

    def repeat(self, version: int) -> None:
        """Do nothing: the files are there."""

    def flush(self, version: int) -> None:
        """Have its files on disk."""
        self._publisher.flush(version)

    def _announce(self, version: int, path: str) -> None:
        known = until_written(lambda: self._link.announce(version, path)) if self._world.is_main else 0
        self._announced = self._world.decide(known)


@dataclass(frozen=True)
class _Written:
    """What a rank has written: tensor name to file name, its files, and bytes of its tensors."""

    index: dict[str, str]
    records: list[FileRecord]
    size: int


class _Share:
    """The files of one rank. After a failure nothing more is written."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.index: dict[str, str] = {}
        """Tensor name to file name."""
        self.records: list[FileRecord] = []
        self.size = 0
        """Bytes of the tensors in them."""
        self.failure: OSError | None = None
        self._directory = directory
        self._rank = rank
        self._held: dict[str, torch.Tensor] = {}
        self._bytes = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take tensors to host memory, and write when there is enough."""
        for name, tensor in tensors.items():
            self._held[name] = tensor.contiguous().cpu()
            self._bytes += tensor.nbytes
        if self._bytes >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held, if anything is."""
        if self._held and self.failure is None:
            self.failure = _attempt(self._save)
        self._held, self._bytes = {}, 0

    def _save(self) -> None:
        name = f"{_prefix(self._rank)}{len(self.records):05d}.safetensors"
        path = self._directory / name
        files.retrying(path, lambda: save_file(self._held, path, metadata={"format": "pt"}))
        self.records += manifest.describe(self._directory, [path])
        self.index |= dict.fromkeys(self._held, name)
        self.size += self._bytes


def _attempt(action: Callable[[], object]) -> OSError | None:
    """The OSError that `action` raises, if any; safetensors wraps its own."""
    try:
        action()
    except OSError as error:
        return error
    except SafetensorError as error:
        return OSError(str(error))
    return None


def _prefix(rank: int) -> str:
    """Of the names of a rank's files."""
    return f"model-{rank:05d}-"


def _flush(directory: Path, rank: int) -> None:
    """Flush a rank's own files; rank 0 flushes the rest and the directories."""
    if rank:
        for path in files.listing(directory, f"{_prefix(rank)}*"):
            durable.sync(path)
    elif files.is_dir(directory):
        durable.sync_tree(directory)


def _remove(directory: Path) -> None:
    durable.remove(directory / filesystem.MANIFEST)  # first: a half-deleted version must not look complete
    files.remove_tree(directory)
