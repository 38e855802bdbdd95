"""Batch files are read unchanged, or refused."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from primeslurm.wire.batches import batch_files
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.decoding import DamagedError
from tests.unit.wire.test_wire import batch


def empty(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


def test_arrays_are_read_into_allocated_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "READ_BYTES", 7)
    frames, rooms, pieces = batch(1).encode(), list[NDArray[np.uint8]](), list[int]()
    batch_files.write(tmp_path / "share", frames)
    assert sum(map(len, frames)) < (tmp_path / "share").stat().st_size < sum(map(len, frames)) + 150

    def room(size: int) -> NDArray[np.uint8]:
        rooms.append(np.zeros(size, np.uint8))
        return rooms[-1]

    found = batch_files.read(tmp_path / "share", room, 10_000, lambda: pieces.append(1))
    assert [bytes(frame) for frame in found.encode()] == [bytes(frame) for frame in frames]
    assert sum(map(len, rooms)) == sum(map(len, frames[1:])) and len(pieces) > sum(map(len, rooms)) / 7
    assert any(np.shares_memory(found.rows[0].token_ids, room) for room in rooms), "the arrays are not copied again"
    assert batch_files.is_there(tmp_path / "share", whole=True)


def test_images_and_routed_experts_are_read(tmp_path: Path) -> None:
    made = batch(1)
    first = made.rows[0]
    routed = np.arange(len(first.token_ids) * 6, dtype=np.uint8).reshape(-1, 3, 2)
    span = ImageSpan("data:image/png;base64,AAAA", 1, 3, "ab" * 32)
    rows = [type(first)(**(vars(row) | {"routed_experts": routed, "images": (span,)})) for row in made.rows]
    batch_files.write(tmp_path / "share", type(made)(made.info, rows).encode())
    found = batch_files.read(tmp_path / "share", empty, 10_000)
    assert all(np.array_equal(row.routed_experts, routed) for row in found.rows if row.routed_experts is not None)
    assert [row.images for row in found.rows] == [(span,)] * len(rows) and found.rows[0].routed_experts is not None


def test_too_large_batch_is_refused(tmp_path: Path) -> None:
    batch_files.write(tmp_path / "share", batch(1).encode())
    with pytest.raises(DamagedError, match="are announced, of at most 3"):
        batch_files.read(tmp_path / "share", empty, 3)
    with pytest.raises(FileNotFoundError):
        batch_files.read(tmp_path / "other", empty, 3)
    assert not batch_files.is_there(tmp_path / "other", whole=False)


@given(data=st.data())
def test_any_damage_is_found(data: st.DataObject) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory, "share")
        batch_files.write(path, batch(1).encode())
        raw = bytearray(path.read_bytes())
        where = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["changed", "cut", "longer"]))
        if how == "changed":
            raw[where] ^= data.draw(st.integers(1, 255))
        elif how == "cut":
            del raw[where:]
        else:
            raw += os.urandom(3)
        path.write_bytes(raw)
        with pytest.raises(DamagedError):
            batch_files.read(path, empty, 10_000)
        assert not batch_files.is_there(path, whole=True)
