"""Images of rollouts are packed whole with their tokens and stored once."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from primeslurm.orchestrator.algorithms import Grpo
from primeslurm.orchestrator.batching.batches import documents
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import RolloutError
from primeslurm.orchestrator.worker.trace_sequences import stored
from primeslurm.wire.batches.batch import Batch, BatchInfo
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.batches import pack

PAD = 7
"""Stands for an image; other tokens are 1."""


def rollout(number: int, length: int, *places: tuple[int, int], sources: tuple[str, ...] = ()) -> Rollout:
    """Random images at these places; the last token is sampled."""
    names = sources or tuple(f"{number}/{i}" for i in range(len(places)))
    images = tuple(ImageSpan(name, start, end) for name, (start, end) in zip(names, places, strict=True))
    tokens = np.ones(length, np.int32)
    for start, end in places:
        tokens[start:end] = PAD
    mask = np.arange(length) == length - 1
    return Rollout(
        RolloutInfo(f"r{number}", "g", "e", 0, float(number), images=images),
        tokens,
        mask,
        np.zeros(length, np.float32),
        np.where(mask, 0, -1).astype(np.int32),
    )


def inline(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_images_are_packed_whole_with_their_documents() -> None:
    found = (rollout(0, 12, (2, 6)), rollout(1, 20, (1, 4), (14, 18)), rollout(2, 5))
    group = RolloutGroup("g", "e", 0, 0, tuple((one,) for one in found))
    docs = documents([group], 16, 0, Grpo())
    assert [len(doc) for doc in docs] == [12, 14, 5], "the second ends before the image that would be cut"
    assert [[p.source for p in doc.images] for doc in docs] == [["0/0"], ["1/0"], []]
    rows = [row for mine in pack(docs, 32, 1, 1.0) for row in mine]
    again = Batch.decode(Batch(BatchInfo(1, 0, 1, 3, has_images=True), rows).encode())
    assert again.info.has_images
    assert [row.images for row in again.rows] == [row.images for row in rows]
    for row in again.rows:
        places = [i for image in row.images for i in range(image.start, image.end)]
        assert np.flatnonzero(row.token_ids == PAD).tolist() == places
    assert sorted(p.source for row in again.rows for p in row.images) == ["0/0", "1/0"]


def test_equal_images_are_stored_once(tmp_path: Path) -> None:
    directory = tmp_path / "images"
    seen = [stored(rollout(i, 9, (1, 3), (5, 7), sources=(inline(b"a"), inline(b"b"))), directory) for i in range(2)]
    assert len(list(directory.iterdir())) == 2
    for found in seen:
        assert [Path(p.source).read_bytes() for p in found.info.images] == [b"a", b"b"]
        assert [(p.start, p.end) for p in found.info.images] == [(1, 3), (5, 7)]
    plain = rollout(0, 4)
    assert stored(plain, tmp_path / "none") is plain and not (tmp_path / "none").exists()


@pytest.mark.parametrize("source", ["https://example.org/a.png", "/etc/passwd", "data:image/png;base64,***"])
def test_invalid_image_fails_its_rollout(source: str, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="an image"):
        stored(rollout(0, 4, (1, 2), sources=(source,)), tmp_path)
