"""Publish policies as Hugging Face model directories or LoRA adapters, which appear only when they are complete.

All ranks write the tensors that they export (`export.parts`) in parallel, in files of FILE_BYTES, and no rank
holds the whole model. Rank 0 writes adapters. A delta is written like a whole model: every rank compares the tensors
that it exports with those that it wrote for the base.

Training waits only for a copy of the policy if every rank's tensors fit into one file: a thread writes them beside
the next step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial as partial_of
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from primeslurm.base import durable, files
from primeslurm.base.durable import retry_until_written
from primeslurm.records.events.training import WeightsPublished
from primeslurm.trainer.distributed.disk_space import retry_while_full
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weight_senders.background import ALIGNMENT, Background, PolicyCopy, beside
from primeslurm.trainer.weight_senders.snapshots import Snapshots
from primeslurm.trainer.weights import model_directory, peft
from primeslurm.trainer.weights.export import Encoding, parts
from primeslurm.trainer.weights.safetensors_header import read_header
from primeslurm.trainer.weights.tensor_files import OpenFiles, TensorFiles
from primeslurm.wire.link.trainer_link import TrainerLink
from primeslurm.wire.stored import checksums
from primeslurm.wire.stored.manifest import FileRecord
from primeslurm.wire.weight_transfer import deltas, filesystem, tensor_names

# Target size of a rank's files. It bounds the tensors that a rank holds in host memory.
FILE_BYTES = 2 * 2**30


class Publisher:
    """Writes policy versions to `<run>/weights`, in collectives. Keeps the newest `keep`, and those of checkpoints.

    Args:
        only_adapter: Versions are LoRA adapters instead of whole models.
        whole: Returns whether a version must be whole. The others may be deltas. None: all are whole.
    """

    def __init__(
        self,
        policy: PolicyModel,
        run_dir: Path,
        encoding: Encoding,
        keep: int,
        world: World,
        only_adapter: bool = False,
        whole: Callable[[int], bool] | None = None,
    ) -> None:
        self._policy = policy
        self._run_dir = run_dir
        self._encoding = encoding
        self._keep = keep
        self._world = world
        self._layout = "adapter" if only_adapter else "hf"
        lora = policy.lora
        self._may_write_beside = not only_adapter and whole is None and not (lora and lora.save_adapter)
        self._largest = 0  # bytes of the largest copy of a rank; 0: no whole version was published yet
        self._copy: PolicyCopy | None = None
        self._snapshots = Snapshots(whole or (lambda version: True))  # used by rank 0, which decides
        self._base: tuple[Path, list[str]] = Path(), []  # directory of the newest whole version, and this rank's files
        self.size: int | None = None
        """On rank 0: bytes of the files of the newest version, if this process published any."""

    def publish(self, version: int) -> Path:
        """Write the policy as `version` and return its directory. A full or read-only disk pauses the call.

        After RankError, nothing is published, and earlier versions are intact.
        """
        return self._write(version, self._world, self._exported)

    def begin(self, version: int, world: World) -> Callable[[], Path]:
        """Copy the policy to host memory, and return a function that publishes the copy as `publish` does.

        The function is a collective of `world`, for one thread of each rank. It must return before the next `begin`. A
        policy whose copy may exceed FILE_BYTES on a rank is published before this returns.
        """
        if not (self._may_write_beside and 0 < self._largest <= FILE_BYTES):
            path = self.publish(version)
            return lambda: path
        if self._copy is None:
            self._copy = PolicyCopy(self._largest, pinned=self._world.device.type == "cuda")
        copy = self._copy
        copy.take(self._exported())
        return lambda: self._write(version, world, copy.read)

    def _write(self, version: int, world: World, tensors: Callable[[], Iterable[dict[str, torch.Tensor]]]) -> Path:
        final = filesystem.version_dir(self._run_dir, version)
        partial = final.with_name(f".{final.name}.partial")

        def write() -> Path:
            return self._write_once(version, world, tensors(), partial, final)

        return retry_while_full(world, self._run_dir, write, partial)

    def _write_once(
        self, version: int, world: World, tensors: Iterable[dict[str, torch.Tensor]], partial: Path, final: Path
    ) -> Path:
        self._on_main(lambda: durable.make_anew(partial), version, world)
        if self._layout == "adapter":
            self._write_adapter(partial, version)
            complete = partial_of(filesystem.complete, partial, version, self._encoding.dtype_name, layout="adapter")
            self._on_main(complete, version, world)
        else:
            base = world.share(self._snapshots.base_of(version) if world.is_main else None)
            written = self._write_model(partial, version, world, tensors, base)
            if self._policy.lora is not None and self._policy.lora.save_adapter:
                self._write_adapter(partial / "adapter", version)
            self._on_main(lambda: self._complete(partial, version, written, base), version, world)
            if base is None:
                self._base = final, sorted(set(written[world.rank].index.values()))
                self._largest = max(of_rank.size + ALIGNMENT * len(of_rank.index) for of_rank in written)
        self._on_main(lambda: self._rename(partial, final, version), version, world)
        return final

    def _on_main(self, action: Callable[[], object], version: int, world: World) -> None:
        """Do `action`, part of publishing `version`, on rank 0. If it fails, every rank raises RankError."""
        world.agree(_attempt(action) if world.is_main else None, f"publishing v{version}")

    def _write_adapter(self, directory: Path, version: int) -> None:
        lora = self._policy.lora
        assert lora is not None
        tensors = peft.tensors(self._policy, self._encoding.dtype)
        write = partial_of(peft.write, directory, tensors, lora.rank, lora.alpha, self._policy.source)
        self._on_main(lambda: files.retrying(directory, write), version, self._world)

    def flush(self, version: int) -> None:
        """Flush a published version to disk. Do nothing if it was not published. Raises RankError."""
        # Only versions of committed steps are flushed: after a power loss, the steps of all others are repeated anyway.
        directory = filesystem.version_dir(self._run_dir, version)
        self._world.agree(_attempt(lambda: _flush(directory, self._world.rank)), f"flushing v{version}")

    def discard_after(self, version: int) -> None:
        """Delete versions after `version`, which an earlier attempt published after its last commit. Then prune."""
        if self._world.is_main:
            for newer in filesystem.published(self._run_dir):
                if newer > version:
                    retry_until_written(partial_of(_remove, filesystem.version_dir(self._run_dir, newer)))
            retry_until_written(lambda: filesystem.prune_behind(self._run_dir, self._keep, version))
        self._world.barrier()

    def is_sound(self, version: int) -> bool:
        return bool(self._world.decide(int(self._world.is_main and self._is_sound(version))))

    def _is_sound(self, version: int) -> bool:
        directory = filesystem.version_dir(self._run_dir, version)
        manifest = filesystem.read_manifest(directory)
        # The layout may differ: an earlier attempt may have sent adapters, or ended with a delta. Versions of
        # checkpoints must be whole.
        return manifest is not None and manifest.layout == self._layout and not filesystem.damage(directory)

    def _exported(self) -> Iterator[dict[str, torch.Tensor]]:
        """Gather the policy with the other ranks, and yield the tensors that this rank exports."""
        for layer in parts(self._policy, self._encoding.gathered, self._world):
            for part in layer:
                whole = part.whole()
                if part.is_exporter:
                    yield self._encoding.encode(part.name, whole)

    def _write_model(
        self,
        directory: Path,
        version: int,
        world: World,
        tensors: Iterable[dict[str, torch.Tensor]],
        base: int | None,
    ) -> list[_Written]:
        with self._open_base(base) as base_files:
            writer = _RankWriter(directory, world.rank, base_files)
            for exported in tensors:  # to the end also after a failed write, because the other ranks gather, too
                writer.add(exported)
            writer.flush()
        world.agree(writer.failure, f"publishing v{version}")
        return world.collect(_Written(writer.index, writer.records, writer.size))

    def _open_base(self, base: int | None) -> contextlib.AbstractContextManager[OpenFiles | None]:
        """Open the files that this rank wrote for version `base`, to compute a delta. None: no base. A collective."""
        if base is None:
            return contextlib.nullcontext()
        directory, names = self._base
        headers = self._world.attempt(lambda: [read_header(directory / name) for name in names], f"reading v{base}")
        return OpenFiles(TensorFiles(directory, {key: place for header in headers for key, place in header.items()}))

    def _complete(self, partial: Path, version: int, written: list[_Written], base: int | None) -> None:
        index = {name: file for of_rank in written for name, file in of_rank.index.items()}
        self._check(index, sum(len(of_rank.index) for of_rank in written))
        encoding, total_size = self._encoding, sum(of_rank.size for of_rank in written)
        if base is None:
            quantization = encoding.quantization(set(index))
            companions = (self._policy.source, partial, index, total_size, encoding.dtype_name, quantization)
            files.retrying(partial, lambda: model_directory.write_companions(*companions))
        records = [record for of_rank in written for record in of_rank.records]
        layout = "hf" if base is None else "delta"
        filesystem.complete(partial, version, encoding.dtype_name, records, layout, base)

    def _rename(self, partial: Path, final: Path, version: int) -> None:
        manifest = filesystem.read_manifest(partial)
        self.size = sum(file.bytes for file in manifest.files) if manifest else None
        base = manifest.base if manifest else None
        # An earlier attempt may have left a version of this number, which was damaged or never committed.
        _remove(final)
        files.rename(partial, final)
        filesystem.prune_behind(self._run_dir, self._keep, version)
        self._snapshots.published(version, base, self.size or 0)

    def _check(self, index: dict[str, str], written: int) -> None:
        # Errors of the sharded export would otherwise show up as wrong rewards only.
        names = {name for name in index if not name.endswith(tensor_names.FP8_SCALE)}
        if names != self._policy.hf_names:
            raise RuntimeError(f"exported tensors and model differ in {sorted(names ^ self._policy.hf_names)[:5]}")
        if written != len(index):
            raise RuntimeError(f"{written - len(index)} tensors were written by more than one rank")


@dataclass
class FilesystemTransfer:
    """Publishes every version as files, beside the next step if possible. Engines read them whenever they start."""

    publisher: Publisher
    run_dir: Path
    model: str
    link: TrainerLink  # used by no one else, because a thread announces versions
    world: World
    announced: int = 0
    """Newest version that engines may read. It must not change, even if a resumed run repeats its step."""

    def __post_init__(self) -> None:
        self._beside = beside(self.world)
        self._background = Background()

    def resume(self, version: int) -> None:
        """Announce `version`, after publishing it again if its files are missing or damaged."""
        if version and not self.publisher.is_sound(version):
            self.publisher.publish(version)
            self.publisher.flush(version)
        self._announce(version, str(filesystem.version_dir(self.run_dir, version)) if version else self.model)
        self.publisher.discard_after(self.announced)

    def transfer(self, version: int, published: Callable[[WeightsPublished], None]) -> None:
        self.finish()
        if version <= self.announced:
            published(WeightsPublished(version, 0.0, size=self.publisher.size))
            return
        write = self.publisher.begin(version, self._beside)
        began = time.monotonic()

        def complete() -> None:
            self._announce(version, str(write()))
            seconds = round(time.monotonic() - began, 3)
            published(WeightsPublished(version, 0.0, size=self.publisher.size, beside_s=seconds))

        self._background.start(complete)

    def pending(self) -> Future[None] | None:
        return self._background.pending()

    def finish(self) -> None:
        self._background.finish()

    def repeat(self, version: int) -> None:
        """Wait until the last version's files are complete. Engines read files without the trainer's help."""
        self.finish()

    def flush(self, version: int) -> None:
        self.publisher.flush(version)

    def _announce(self, version: int, path: str) -> None:
        announced = retry_until_written(lambda: self.link.announce(version, path)) if self.world.is_main else 0
        self.announced = self._beside.decide(announced)


@dataclass(frozen=True)
class _Written:
    """Files of one version that one rank wrote: the file of each tensor, all files, and the bytes of the tensors."""

    index: dict[str, str]
    records: list[FileRecord]
    size: int


class _RankWriter:
    """Writes the files of one rank. It writes nothing more after a failure. `base`: this rank's files of the base."""

    def __init__(self, directory: Path, rank: int, base: OpenFiles | None = None) -> None:
        self.index: dict[str, str] = {}
        """Tensor name to file name."""
        self.records: list[FileRecord] = []
        self.size = 0
        """Bytes of all tensors in the files."""
        self.failure: OSError | None = None
        self._directory = directory
        self._rank = rank
        self._base = base
        self._held: dict[str, torch.Tensor] = {}
        self._names: list[str] = []  # exported tensors that `_held` represents
        self._digests: dict[str, str] = {}
        self._bytes = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy tensors to host memory, or their changes, and write a file once there are FILE_BYTES."""
        if self.failure is None:
            self.failure = _attempt(lambda: self._hold(tensors))
        if self._bytes >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._names and self.failure is None:
            self.failure = _attempt(self._save)
        self._held, self._names, self._digests, self._bytes = {}, [], {}, 0

    def _hold(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            whole = tensor.contiguous().cpu()
            stored = {name: whole}
            if self._base is not None:
                self._digests[name] = deltas.digest(whole)
                stored = deltas.changes(name, whole, self._base.tensor(name))
            self._names.append(name)
            self._held |= stored
            self._bytes += sum(part.nbytes for part in stored.values())

    def _save(self) -> None:
        name = f"{_prefix(self._rank)}{len(self.records):05d}.safetensors"
        path = self._directory / name
        files.retrying(path, lambda: save_file(self._held, path, metadata={"format": "pt", **self._digests}))
        self.records.append(FileRecord(name, files.retrying(path, path.stat).st_size, checksums.of(path)))
        self.index |= dict.fromkeys(self._names, name)
        self.size += self._bytes


def _attempt(action: Callable[[], object]) -> OSError | None:
    """Run an action and return its OSError, if any. safetensors raises its own error for I/O failures."""
    try:
        action()
    except OSError as error:
        return error
    except SafetensorError as error:
        return OSError(str(error))
    return None


def _prefix(rank: int) -> str:
    return f"model-{rank:05d}-"


def _flush(directory: Path, rank: int) -> None:
    """Flush this rank's weight files to disk. Rank 0 flushes the whole directory."""
    if rank:
        for path in files.listing(directory, f"{_prefix(rank)}*"):
            durable.sync(path)
    elif files.is_dir(directory):
        durable.sync_tree(directory)


def _remove(directory: Path) -> None:
    durable.remove(directory / filesystem.MANIFEST)  # first, so that a partly deleted version does not look complete
    files.remove_tree(directory)
