"""Loading a full-size model into the trainer, without GPUs: what each rank reads, and the cost.

The checkpoint is sparse: real names, shapes, headers and sizes, without data. Ranks are assembled in fake process
groups. One rank really reads `--layers` layers into host memory; for all ranks the reads are counted. Prints a line of
JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import re
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.support.meta_rank import _group, _in_transformers, config_of
from benchmarks.trainer_layouts import trainer_gpus
from primeslurm.base.model_files import INDEX
from primeslurm.models import model_builder
from primeslurm.nn.block_sizes import FP8_BLOCK
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.trainer.assembly import build
from primeslurm.trainer.checkpoints.staging import tensor_bytes
from primeslurm.trainer.weights import four_bits, loading
from primeslurm.trainer.weights.tensor_files import TensorFiles
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE, in_fp8

T = TypeVar("T")
FILE_BYTES = 5 << 30
# Formats of a checkpoint, as its config describes them.
STORED: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK] * 2},
    "mxfp4": {"quant_method": "mxfp4"},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}},
    },
}
_OF_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
# Columns of a 4-bit row that share a scale.
_GROUP = 32
CPU = torch.device("cpu")


def write_sparse(config: Any, directory: Path, stored: str) -> None:
    """Write a sparse checkpoint of a transformers config: headers and holes."""
    spec = model_builder.spec(config, 128, "flex")
    with torch.device("meta"):
        model = spec.model.build()
    named = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    entries = [entry for name, tensor in named.items() for entry in _entries(name, tensor, stored)]
    index: dict[str, str] = {}
    for number, share in enumerate(_files(entries)):
        index |= dict.fromkeys(
            _write(directory / f"model-{number:05d}.safetensors", share), f"model-{number:05d}.safetensors"
        )
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _entries(name: str, tensor: torch.Tensor, stored: str) -> list[tuple[str, str, list[int], int]]:
    shape = list(tensor.shape)
    size = math.prod(shape)
    if stored == "int4" and _OF_EXPERT.search(name):
        codes, groups = [shape[0], shape[1] // 8], [shape[0], shape[1] // _GROUP]
        return [
            (name + "_packed", "I32", codes, size // 2),
            (name + "_scale", "BF16", groups, 2 * math.prod(groups)),
            (name + "_shape", "I32", [2], 8),
        ]
    if stored == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        groups = [shape[0], shape[2], shape[1] // _GROUP]
        return [(name + "_blocks", "U8", [*groups, 16], size // 2), (name + "_scales", "U8", groups, math.prod(groups))]
    if stored != "fp8" or not in_fp8(name) or len(shape) != 2:
        return [(name, "BF16", shape, 2 * size)]
    blocks = [-(-length // FP8_BLOCK) for length in shape]
    return [(name, "F8_E4M3", shape, size), (name + FP8_SCALE, "F32", blocks, 4 * math.prod(blocks))]


def _files(entries: list[tuple[str, str, list[int], int]]) -> Iterator[list[tuple[str, str, list[int], int]]]:
    share: list[tuple[str, str, list[int], int]] = []
    for entry in entries:
        share.append(entry)
        if sum(size for *_, size in share) >= FILE_BYTES:
            yield share
            share = []
    if share:
        yield share


def _write(path: Path, entries: list[tuple[str, str, list[int], int]]) -> list[str]:
    header, at = {}, 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return list(header)


def asked_for(recipe: Recipe, config: dict[str, Any], files: TensorFiles, size: int, rank: int) -> dict[str, int]:
    """Count the bytes, reads and files of one rank, and what it would read without the exchange of columns."""
    with _group(rank, size) as world:
        policy = build.assemble(_in_transformers(config), files.directory, recipe, world, files=files)
        found: Counter[str] = Counter()
        opened: set[str] = set()
        for group in build._loaded_together(policy, policy.weights()):
            for name, tensor in policy.adapter.to_hf(group).items():
                part = loading.shard_read(files, name, tensor)
                width, below = part.place.torch_dtype.itemsize, math.prod(part.place.shape[1:])
                pieces = list(part.row_slices())
                everything = sum(_bytes(part, piece) for piece in pieces)
                opened.add(part.place.file)
                found["not exchanged"] += everything
                found["held"] += int(part.target.numel() * (width if part.codes is None else _bytes_of_a_code(part)))
                if part.group and part.codes:
                    found["bytes"] += -(-everything // dist.get_world_size(part.group))
                    found["exchanged"] += everything
                    found["reads"] += 2 * len(pieces)
                elif part.group:
                    rows = min(loading.rows_per_rank(part), part.place.shape[0])
                    found["bytes"] += rows * below * width
                    found["exchanged"] += part.place.nbytes
                    found["reads"] += 1
                else:
                    found["bytes"] += everything
                    found["reads"] += len(pieces)
        return {**found, "files": len(opened)}


def _bytes(part: loading.ShardRead, piece: loading.RowSlice) -> int:
    """Return the bytes of a slice, including its scales if it is in four bits."""
    place = part.place
    read = piece.rows * math.prod(place.shape[len(piece.slab) + 1 :]) * place.torch_dtype.itemsize
    return read + (read * part.codes.scales.nbytes // place.nbytes if part.codes else 0)


def _bytes_of_a_code(part: loading.ShardRead) -> float:
    assert part.codes is not None
    return (part.place.nbytes + part.codes.scales.nbytes) / math.prod(part.codes.shape)


def really(recipe: Recipe, config: dict[str, Any], files: TensorFiles, size: int, rank: int) -> dict[str, float]:
    """Assemble a rank in host memory and load it. Return the seconds and the peak memory."""
    with _group(rank, size) as meta:
        world, values = replace(meta, device=CPU, host=CPU), _in_transformers(config)
        began = time.process_time()
        drawn = build.assemble(values, files.directory, recipe, world)
        middle = time.process_time()
        del drawn
        before = time.process_time(), time.monotonic()
        policy = build.assemble(values, files.directory, recipe, world, files=files)
        assembled = time.process_time(), time.monotonic()
        held = tensor_bytes(policy.weights())
        build._load(policy, values, files)
        done = time.process_time(), time.monotonic()
    return {
        "assembled_and_drawn_cpu_s": round(middle - began, 1),
        "assembled_cpu_s": round(assembled[0] - before[0], 1),
        "load_s": round(done[1] - assembled[1], 1),
        "load_cpu_s": round(done[0] - assembled[0], 1),
        "weights_gb": round(held / 1e9, 2),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }


def dequantising(rows: int = 2048, columns: int = 6144) -> dict[str, float]:
    """Return the billions of weights per second that one CPU core converts, for each format."""
    raw = torch.randint(0, 120, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    codes, of_groups = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8), (rows, columns // _GROUP)
    ways: dict[str, Callable[[], object]] = {
        "fp8": lambda: loading.dequantize(raw, scales, 0, 0),
        "mxfp4": partial(four_bits.dequantize, "mxfp4", codes, torch.randint(110, 130, of_groups, dtype=torch.uint8)),
        "int4": partial(four_bits.dequantize, "int4", codes, torch.rand(of_groups).bfloat16()),
    }
    found = {}
    for name, way in ways.items():
        way()
        began = time.process_time()
        for _ in range(4):
            way()
        found[f"{name}_billion_a_core_second"] = round(4 * raw.numel() / (time.process_time() - began) / 1e9, 3)
    return found


def _alone(look: Callable[[], T]) -> T:
    """Run in a separate process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(look)


def measure(path: Path, ranks: list[int], layers: int, stored: str, ranks_in_all: int | None) -> dict[str, Any]:
    """Inspect some ranks of a recipe's trainer, and load a few layers of the first one."""
    recipe = load_recipe(path)
    size = ranks_in_all or trainer_gpus(recipe)
    found: dict[str, Any] = {"recipe": path.stem, "ranks": size, "stored": stored}
    for number in (None, layers):
        config = config_of(recipe.model.path, number)
        if STORED[stored]:
            config.get("text_config", config)["quantization_config"] = STORED[stored]
        with tempfile.TemporaryDirectory() as directory:
            _alone(partial(write_sparse, _in_transformers(config), Path(directory), stored))
            began = time.monotonic()
            files = TensorFiles.read(Path(directory))
            if number is None:
                found["headers"] = len({place.file for place in files.places.values()})
                found["headers_s"] = round(time.monotonic() - began, 1)
                total = sum(place.nbytes for place in files.places.values())
                total += sum(codes.scales.nbytes for codes in files.four_bits.values())
                found["model_gb"] = round(total / 1e9, 1)
                shares = [_alone(partial(asked_for, recipe, config, files, size, rank)) for rank in ranks]
                found["of_a_rank"] = shares[0]
                found["all_ranks_read_models"] = round(sum(s["bytes"] for s in shares) / len(shares) * size / total, 3)
                found["not_exchanged_models"] = round(
                    sum(s["not exchanged"] for s in shares) / len(shares) * size / total, 3
                )
            else:
                found[f"{layers}_layers"] = _alone(partial(really, recipe, config, files, size, ranks[0]))
    return found | dequantising()


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks loading", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--ranks", default="0,37,95", help="that are looked at, with commas between them")
    parser.add_argument("--layers", type=int, default=4, help="that are really read")
    parser.add_argument("--stored", choices=STORED, default="bf16", help="how the checkpoint is stored")
    parser.add_argument("--of", type=int, help="ranks in all. Default: the recipe's")
    logging.getLogger("torchtitan").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    options = parser.parse_args(words)
    found = measure(
        options.recipe, [int(rank) for rank in options.ranks.split(",")], options.layers, options.stored, options.of
    )
    print(json.dumps(found), flush=True)
