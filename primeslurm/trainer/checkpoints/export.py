"""Export a checkpoint as a Hugging Face model, in one process without a GPU, one layer at a time.

    python -m primeslurm.trainer.checkpoints.export --recipe RESOLVED --checkpoint DIR --out DIR

The checkpoint may have been written by any number of ranks. Adapters of a LoRA run are merged into the model's weights.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from primeslurm.base import durable
from primeslurm.base import files as storage
from primeslurm.base.model_files import locate
from primeslurm.models import model_builder
from primeslurm.nn.checkpoint_names import adapter_for_checkpoint
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Lora
from primeslurm.trainer.assembly import converters, generic_model
from primeslurm.trainer.base.model_draft import ModelDraft
from primeslurm.trainer.checkpoints.shards import ByteCounter, ShardReader
from primeslurm.trainer.components import draft_layer
from primeslurm.trainer.components.lora import A, is_adapter, merge
from primeslurm.trainer.distributed.cpu_affinity import io_threads
from primeslurm.trainer.weights import model_directory
from primeslurm.trainer.weights.export import Encoding, by_layer, cast
from primeslurm.trainer.weights.tensor_files import OpenFiles, TensorFiles
from primeslurm.wire import exit_codes
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

# Prefixes of the tensors of the model, and of its draft layer, in a checkpoint
_PREFIX, _DRAFT_PREFIX = "model.", "draft_layer."


def export(recipe: Recipe, checkpoint: Path, out: Path) -> None:
    """Write the weights of a committed checkpoint to `out`, which must not exist.

    Weights are in the compute dtype, and in FP8 where the model's own checkpoint is. Raises OSError for damaged and
    inaccessible files, and ValueError for checkpoints of another model.
    """
    source = locate(recipe.model.path)
    files = TensorFiles.read(source)
    config = model_directory.load_config(source)
    adapter, expected = _adapter(recipe, config, files)
    unchanged: tuple[str, ...] = getattr(adapter, "unchanged", ())
    expected |= {name for name in files.places if name.startswith(unchanged)}
    drafter, copies = None, dict[str, str]()
    if recipe.trainer.draft_layer is not None:
        drafter, names = _draft_adapter(recipe, config)
        copies = drafter.copies(set(files.places))
        expected |= names | set(copies.values())
    stored = files.fp8_names() if recipe.task == "rl" else frozenset()
    encoding = Encoding(getattr(torch, recipe.model.dtype), stored=stored, trained_in_fp8=recipe.trainer.fp8)
    partial = out.with_name(f".{out.name}.partial")
    storage.remove_tree(partial)
    storage.make_directory(partial)
    index: dict[str, str] = {}
    sizes: list[int] = []

    def write(tensors: dict[str, torch.Tensor], file: str) -> None:
        dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
        storage.retrying(partial / file, lambda: save_file(dense, partial / file, metadata={"format": "pt"}))
        index.update(dict.fromkeys(tensors, file))
        sizes.extend(tensor.nbytes for tensor in tensors.values())

    layers = _layers(checkpoint / "trainer")
    if lora := recipe.trainer.lora:
        converted = _merged(layers, lora, adapter, files, expected, encoding.dtype)
    else:
        converted = (adapter.to_hf(layer) for layer in layers)
    if drafter is not None:
        of_drafts = _layers(checkpoint / "trainer", _DRAFT_PREFIX)
        converted = chain(converted, map(drafter.to_hf, of_drafts))
    for number, layer in enumerate(converted):
        layer |= {copies[name]: tensor.clone() for name, tensor in layer.items() if name in copies}
        encoded = (encoding.encode(name, tensor) for name, tensor in layer.items())
        tensors = {name: tensor for parts in encoded for name, tensor in parts.items()}
        if tensors:  # some layers consist of buffers that Hugging Face's format does not have
            write(tensors, f"model-{number:05d}.safetensors")
    if unknown := sorted({name.removesuffix(FP8_SCALE) for name in index} - expected):
        raise ValueError(f"{source} has no {', '.join(unknown[:5])}")
    if frozen := expected - set(index):
        write(_frozen(files, frozen, encoding.dtype), "model-frozen.safetensors")
    quantization = encoding.quantization(set(index))
    model_directory.write_companions(source, partial, index, sum(sizes), encoding.dtype_name, quantization)
    for file in set(index.values()):
        shutil.copymode(partial / "config.json", partial / file)  # safetensors 0.8 writes files for their owner alone
    durable.sync_tree(partial)
    durable.rename(partial, out)


def _merged(
    layers: Iterable[dict[str, torch.Tensor]],
    lora: Lora,
    adapter: Any,
    files: TensorFiles,
    expected: set[str],
    dtype: torch.dtype,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the expected tensors of a model by layer, with the changes of LoRA adapters added."""
    if files.four_bits or files.fp8_names():
        raise ValueError(f"{files.directory} is quantised: adapters can only be merged into weights of full precision")
    left = set(expected)
    with OpenFiles(files) as opened:
        for layer in layers:
            zeros = {name.removesuffix(A): torch.zeros(()) for name in layer if name.endswith(A)}
            buffers = {name: tensor for name, tensor in layer.items() if not is_adapter(name)}
            changes = adapter.to_hf(merge({name: layer[name] for name in layer.keys() - buffers.keys()} | zeros, lora))
            changed = {name: opened.tensor(name).float() + change for name, change in changes.items() if name in left}
            tensors = changed | adapter.to_hf(buffers)
            if unknown := sorted((changes.keys() | tensors.keys()) - left):
                raise ValueError(f"{files.directory} has no {', '.join(unknown[:5])}")
            left -= tensors.keys()
            yield {name: cast(name, tensor, dtype) for name, tensor in tensors.items()}
        for names in by_layer(sorted(left)):
            yield {name: cast(name, opened.tensor(name), dtype) for name in names}


def _adapter(recipe: Recipe, config: Any, files: TensorFiles) -> tuple[Any, set[str]]:
    if model_builder.is_generic(recipe.model.impl, config):
        with torch.device("meta"):
            model: Any = generic_model.GenericModel(config)
        adapter: Any = generic_model.GenericAdapter(model)
    else:
        spec = model_builder.spec(config, recipe.seq_len, "flex")
        with torch.device("meta"):
            model = spec.model.build()
        adapter = spec.state_dict_adapter(spec.model, None)
        if recipe.trainer.lora is not None:
            adapter = adapter_for_checkpoint(adapter, files.places)  # its tensors are added to those of the files
    return adapter, set(adapter.to_hf(model.state_dict()))


def _draft_adapter(recipe: Recipe, config: Any) -> tuple[Any, set[str]]:
    spec = draft_layer.spec(config, recipe.seq_len, "flex")
    draft = ModelDraft(recipe, spec, draft_layer=config.get_text_config().num_hidden_layers)
    converters.build(draft)
    draft_layer.convert(draft)
    return draft.adapter, set(draft.adapter.to_hf(draft.model.state_dict()))


def _frozen(files: TensorFiles, names: set[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if missing := sorted(names - set(files.places)):
        raise ValueError(f"neither the checkpoint nor {files.directory} has {', '.join(missing[:5])}")
    with OpenFiles(files) as opened:
        return {name: cast(name, opened.tensor(name), dtype) for name in sorted(names)}


def _layers(directory: Path, prefix: str = _PREFIX) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of a model: first those outside of layers, then one layer at a time."""
    read_metadata = dcp.FileSystemReader(directory).read_metadata
    stored = storage.retrying(directory / ".metadata", read_metadata).state_dict_metadata
    sizes = {
        name.removeprefix(prefix): entry
        for name, entry in stored.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    for names in by_layer(sizes):
        tensors = {name: torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype) for name in names}
        reader = ShardReader(directory, ByteCounter(), io_threads())
        try:
            dcp.load({prefix.rstrip("."): tensors}, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # derives from BaseException
            raise OSError("; ".join(str(wrapped[0]) for wrapped in error.failures.values())) from error
        yield tensors


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.trainer.checkpoints.export", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe (JSON)")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        recipe = Recipe.model_validate_json(storage.read_text(arguments.recipe))
        export(recipe, arguments.checkpoint, arguments.out)
    except (OSError, SafetensorError, ValueError) as error:
        print(error, file=sys.stderr)
        return exit_codes.FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
