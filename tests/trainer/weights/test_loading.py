"""Loading a model: each rank reads only its shards, and errors name the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from primeslurm.base.model_files import INDEX
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.weights import loading
from primeslurm.trainer.weights.safetensors_header import TensorLocation
from primeslurm.trainer.weights.tensor_files import OpenFiles, TensorFiles
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE
from tests.trainer.as_released import quantize
from tests.trainer.conftest import finish, make_recipe, printed, start_ranks
from tests.trainer.families import BY_NAME, write
from tests.trainer.four_bits import int4, mxfp4


def test_two_ranks_read_every_element_once(tmp_path: Path) -> None:
    """Sharded by rows and columns, evenly and unevenly, in FP8, in four bits and plain. Names end with the sharding."""
    torch.manual_seed(0)
    rows, columns = quantize(torch.randn(301, 200)), quantize(torch.randn(301, 384))
    meant = {
        "plain.0": torch.randn(301, 70).bfloat16(),
        "plain.1": torch.randn(33, 70).bfloat16(),
        "vector.0": torch.randn(5),
        "stack.1": torch.randn(3, 6, 7),
        "long.1": torch.randn(3, 6, 20_000),
    }
    stored = meant | {
        "fp8.0": rows[0],
        "fp8.0" + FP8_SCALE: rows[1],
        "fp8.1": columns[0],
        "fp8.1" + FP8_SCALE: columns[1],
    }
    meant |= {"fp8.0": rows[2], "fp8.1": columns[2]}
    codes, four_bits = _in_four_bits()
    save_file(stored | codes, tmp_path / "model.safetensors")
    outputs = finish(start_ranks(2, "tests.trainer.weights.loading_ranks", str(tmp_path), str(tmp_path)))
    for rank in range(2):
        actual = torch.load(tmp_path / str(rank), weights_only=True)
        assert set(actual) == set(meant | four_bits)
        for name, tensor in (meant | four_bits).items():
            assert torch.equal(actual[name], tensor.float()), name
    counts = [counts for output in outputs for counts in printed(output, "READ")]
    # Runs of a few bytes are read with what lies between them: here stacks, split within each of their matrices.
    twice = ("stack.1", "mx.2", "mx.2's scales")
    elements = {name: tensor.numel() for name, tensor in meant.items()}
    elements |= {name: tensor.numel() // 2 for name, tensor in four_bits.items()}
    elements |= {f"{name}'s scales": tensor.numel() // 32 for name, tensor in four_bits.items()}
    read = {name: sum(count.get(name, 0) for count in counts) for name in elements}
    assert read == {name: number * (2 if name in twice else 1) for name, number in elements.items()}
    assert all(count[name] < number for count in counts for name, number in elements.items() if name not in twice)


def _in_four_bits() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return stored tensors and their dequantized values."""
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for split in (0, 1):
        parts, meant[f"int.{split}"] = int4(torch.randn(51, 192))
        stored |= {f"int.{split}{name.removeprefix('weight')}": tensor for name, tensor in parts.items()}
    for split in (0, 1, 2):
        parts, meant[f"mx.{split}"] = mxfp4(3, 25, 96)
        stored |= {f"mx.{split}{name}": tensor for name, tensor in parts.items()}
    return stored, meant


@pytest.mark.parametrize("whole_rows", [False, True])
def test_row_slices_cover_the_region_once(whole_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "CHUNK_BYTES", 64)
    monkeypatch.setattr(loading, "MIN_RUN_BYTES", 24)
    shape = (4, 5, 6)
    numbers = torch.arange(4 * 5 * 6).view(shape)
    regions = [
        (slice(a, b), slice(c, d), slice(e, f))
        for a, b in ((0, 4), (1, 3), (2, 2))
        for c, d in ((0, 5), (2, 3))
        for e, f in ((0, 6), (1, 2), (0, 5))
    ]
    for region in regions:
        read: list[int] = []
        for piece in loading.row_slices(TensorLocation("f", 0, shape, "F32"), region, whole_rows):
            assert not whole_rows or piece.slab == ()
            read += numbers[piece.slab][piece.row : piece.row + piece.rows].flatten().tolist()
        assert len(read) == len(set(read))
        assert set(numbers[region].flatten().tolist()) <= set(read)
        if not numbers[region].numel():
            assert not read


def test_loaded_weights_are_not_initialized(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["qwen3_moe"]
    path = write(case, tmp_path)

    def refuse(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert tensor.is_meta, "drawn"  # as modules do when they are made, which costs nothing
        return tensor

    for name in ("trunc_normal_", "normal_", "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, refuse)
    monkeypatch.setattr(torch.Tensor, "normal_", refuse)
    policy = build(make_recipe(path), world)
    assert all(tensor.isfinite().all() for tensor in policy.weights().values())


def _cut(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate((path / "model.safetensors").stat().st_size - 1)


def _no_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"no header at all")


def _no_offsets(path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [4]}}'
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def _missing(path: Path) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (_cut, ValueError, "model.safetensors: truncated, 79 bytes of 80"),
        (_no_header, ValueError, "model.safetensors: not a safetensors file, or truncated"),
        (_no_offsets, ValueError, "model.safetensors: cannot read its header: .*data_offsets"),
        (_missing, FileNotFoundError, "other.safetensors"),
    ],
)
def test_damaged_files_are_named(
    harm: Callable[[Path], None], error: type[Exception], message: str, world: World, tmp_path: Path
) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    harm(tmp_path)
    with pytest.raises(error, match=message):
        TensorFiles.shared(tmp_path, world)


def test_wrong_shape_is_rejected_before_reading(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(4, 2), "b" + FP8_SCALE: torch.zeros(1), "b": torch.zeros(4)}, tmp_path / "x.safetensors"
    )
    files = TensorFiles.read(tmp_path)
    with pytest.raises(ValueError, match="a is 4 x 2 in the files, but 2 x 4"):
        loading.shard_read(files, "a", torch.zeros(2, 4))
    with pytest.raises(ValueError, match="b is stored in FP8 but is no matrix"):
        loading.shard_read(files, "b", torch.zeros(4))
    with OpenFiles(files) as opened:
        assert torch.equal(opened.tensor("a"), torch.zeros(4, 2))
