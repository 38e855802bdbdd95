"""Truncated, flipped or foreign model files. Trainers allocate memory according to them."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from primeslurm.base.model_files import INDEX
from primeslurm.trainer.weights.safetensors_header import read_header
from primeslurm.trainer.weights.tensor_files import TensorFiles
from tests.unit.fuzz.mutations import bounded, fuzzed, texts
from tests.unit.fuzz.test_files import damaged


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [16, 19]},
}


def safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(19)


@fuzzed(2)
@given(damaged(HEADER).map(safetensors) | texts(safetensors(json.dumps(HEADER).encode())))
def test_headers_of_tensors(directory: Path, data: bytes) -> None:
    """Only tensors that are in the file are read into memory."""
    path = directory / "model.safetensors"
    path.write_bytes(data)
    found, told = {}, str(path)
    with bounded(len(data), factor=64):
        try:
            found = read_header(path)
        except ValueError as error:
            told = str(error)
    assert str(path) in told
    for place in found.values():
        assert place.offset >= 0 and place.offset + place.nbytes <= len(data)


LIES = {
    "more than the file": {"shape": [2**20, 2**20]},
    "more than its place": {"shape": [2, 2, 2]},
    "less than its place": {"shape": [2]},
    "of another width": {"dtype": "F64"},
    "nothing, 2**60 times": {"shape": [0, 2**60]},
    "an end before its beginning": {"data_offsets": [16, 0]},
}


@pytest.mark.parametrize("lie", list(LIES.values()), ids=list(LIES))
def test_stated_tensor_sizes_are_not_trusted(directory: Path, lie: dict[str, Any]) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(safetensors(json.dumps(HEADER).encode()))
    assert {name: place.nbytes for name, place in read_header(path).items()} == {"a": 16, "b": 3}
    path.write_bytes(safetensors(json.dumps({**HEADER, "a": {**HEADER["a"], **lie}}).encode()))
    with pytest.raises(ValueError, match=re.escape(f"{path}: a (")):
        read_header(path)


@fuzzed()
@given(damaged({"metadata": {}, "weight_map": {"a": "model.safetensors"}}))
def test_indices_of_tensors(directory: Path, data: bytes) -> None:
    (directory / "model.safetensors").write_bytes(safetensors(json.dumps(HEADER).encode()))
    (directory / INDEX).write_bytes(data)
    told = str(directory)
    try:
        assert set(TensorFiles.read(directory).places) <= {"a", "b"}
    except (OSError, ValueError) as error:
        told = str(error)
    assert str(directory) in told
