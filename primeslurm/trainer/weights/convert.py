"""Convert a quantized model to bfloat16, without a GPU and in little memory.

    python -m primeslurm.trainer.weights.convert --source DIR --out DIR

The model is written file by file to a partial directory, which is renamed to `out` at the end. A conversion that was
killed resumes with the missing files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from primeslurm.base import durable
from primeslurm.nn.block_sizes import FP8_BLOCK
from primeslurm.trainer.distributed.cpu_affinity import io_threads
from primeslurm.trainer.weights import four_bits, model_directory
from primeslurm.trainer.weights.four_bits import FourBits
from primeslurm.trainer.weights.loading import dequantize
from primeslurm.trainer.weights.safetensors_header import TensorLocation
from primeslurm.trainer.weights.tensor_files import OpenFiles, TensorFiles
from primeslurm.wire import exit_codes
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

# Elements per thread in memory. Matrices of a stack that have to be transposed are converted whole.
AT_ONCE = 1 << 24
# File in the partial directory that identifies the source. A partial directory of another source is deleted.
_RECORD = "conversion.json"
# Code of the model, such as a custom tokenizer
_CODE = "*.py"


@dataclass(frozen=True)
class Conversion:
    """The converted model: quantized weights in bfloat16, other tensors as they are stored."""

    files: TensorFiles
    opened: OpenFiles
    fp8: frozenset[str]  # names of weights in FP8 blocks

    def names(self) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = {}
        for name, place in sorted(self.files.places.items(), key=lambda item: item[1].offset):
            if name.removesuffix(FP8_SCALE) not in self.fp8 or name in self.fp8:
                by_file.setdefault(place.file, []).append(name)
        return by_file

    def entry(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """Return the safetensors dtype, the shape and the bytes of a converted weight."""
        place, codes = self.files.places[name], self.files.four_bits.get(name)
        shape = codes.shape if codes else place.shape
        quantised = codes or name in self.fp8
        return ("BF16", shape, 2 * math.prod(shape)) if quantised else (place.dtype, shape, place.nbytes)

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield consecutive chunks of a converted weight. Raises OSError."""
        place, codes = self.files.places[name], self.files.four_bits.get(name)
        if codes:
            yield from self._four_bit_chunks(name, codes)
        elif name in self.fp8:
            yield from self._fp8_chunks(name, place)
        else:
            size = math.prod(place.shape)
            for first in range(0, size, AT_ONCE):
                yield self.opened.part(name, first, min(AT_ONCE, size - first))

    def _four_bit_chunks(self, name: str, codes: FourBits) -> Iterator[torch.Tensor]:
        width, groups, rows = codes.columns // 2, codes.scales.shape[-1], math.prod(codes.rows)
        step = codes.rows[-1] if codes.transposed else max(1, AT_ONCE // codes.columns)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            raw = self.opened.part(name, row * width, count * width).view(count, width)
            scales = self.opened.at(codes.scales, row * groups, count * groups).view(count, groups)
            values = four_bits.dequantize(codes.code, raw, scales).bfloat16()
            yield values.mT if codes.transposed else values

    def _fp8_chunks(self, name: str, place: TensorLocation) -> Iterator[torch.Tensor]:
        rows, columns = place.shape
        blocks = self.files.places[name + FP8_SCALE].shape[1]
        step = max(1, AT_ONCE // (FP8_BLOCK * columns)) * FP8_BLOCK
        for row in range(0, rows, step):
            count = min(step, rows - row)
            raw = self.opened.part(name, row * columns, count * columns).view(count, columns)
            first, last = row // FP8_BLOCK, -(-(row + count) // FP8_BLOCK)
            scales = self.opened.part(name + FP8_SCALE, first * blocks, (last - first) * blocks).view(-1, blocks)
            yield dequantize(raw, scales, 0, 0).bfloat16()

    def write(self, names: list[str], path: Path) -> None:
        """Write weights to a file, which appears only when it is complete and on disk. Raises OSError."""
        header, end = {}, 0
        for name in names:
            dtype, shape, size = self.entry(name)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                for chunk in self.chunks(name):
                    file.write(chunk.contiguous().flatten().view(torch.uint8).numpy().data)
            os.fsync(file.fileno())
        durable.rename(partial, path)


def convert(source: Path, out: Path) -> None:
    """Convert a model and write it to `out`, which must not exist.

    Raises OSError, and ValueError if the model's files are damaged or have no weight in a supported format.
    """
    files = TensorFiles.read(source)
    fp8 = files.fp8_names()
    if not files.four_bits and not fp8:
        raise ValueError(f"{source}: no weight is stored in INT4, MXFP4 or block-scale FP8")
    if stacks := [name for name in fp8 if len(files.places[name].shape) != 2]:
        raise ValueError(f"{source}: {min(stacks)} is stored in FP8 but is no matrix")
    partial = _partial_directory(source, out)
    with OpenFiles(files) as opened:
        conversion = Conversion(files, opened, fp8)
        names = conversion.names()
        missing = [file for file in names if not (partial / file).exists()]
        _check_free_space(partial, sum(conversion.entry(name)[2] for file in missing for name in names[file]))
        with ThreadPoolExecutor(io_threads(), "converting") as threads:
            written = [threads.submit(conversion.write, names[file], partial / file) for file in missing]
            try:
                for number, done in enumerate(as_completed(written), len(names) - len(missing) + 1):
                    done.result()
                    print(f"{number} of {len(names)} files", file=sys.stderr, flush=True)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
    index = {name: file for file, names_in_file in names.items() for name in names_in_file}
    total_size = sum(conversion.entry(name)[2] for name in index)
    model_directory.write_companions(source, partial, index, total_size, "bfloat16")
    for code in source.glob(_CODE):
        shutil.copyfile(code, partial / code.name)
    (partial / _RECORD).unlink()
    durable.sync_tree(partial)
    durable.rename(partial, out)


def _partial_directory(source: Path, out: Path) -> Path:
    """Return the partial directory of this conversion, with the complete files of an earlier attempt."""
    partial = out.with_name(f".{out.name}.partial")
    sizes = {file.name: file.stat().st_size for file in sorted(source.glob("*.safetensors"))}
    record = json.dumps({"source": str(source), "sizes": sizes})
    if partial.exists() and (not (partial / _RECORD).exists() or (partial / _RECORD).read_text() != record):
        shutil.rmtree(partial)
    partial.mkdir(exist_ok=True)
    for incomplete in partial.glob(".*"):  # files that a killed attempt was writing
        incomplete.unlink()
    durable.write(partial / _RECORD, record)
    return partial


def _check_free_space(directory: Path, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < size:
        raise OSError(f"{directory.parent}: the conversion needs {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.trainer.weights.convert", description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        convert(arguments.source, arguments.out)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return exit_codes.FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
