"""Models that see images, against transformers: packed, trained and frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeslurm.recipe import Recipe
from primeslurm.trainer.images import vision_input
from primeslurm.trainer.parallel import Policy, build
from primeslurm.trainer.world import World
from primeslurm.wire.rollouts import Images, Row
from tests.trainer.conftest import SEQ_LEN, make_recipe
from tests.trainer.families import CASES, IMAGES, Case, reference_of, write

SEEING = [case for case in CASES if hasattr(case.config(), "vision_config")]
MERGE, PATCH_VALUES = 2, 3 * 2 * 4 * 4
Grid = tuple[int, int]
DOCUMENTS: tuple[tuple[Grid, ...], ...] = (((4, 6), (2, 2)), (), ((6, 4),))
"""Patches in height and width of the images of each document: two, none and one."""


def document(grids: tuple[Grid, ...], seed: int) -> tuple[np.ndarray, Images]:
    """Random text with random images in it."""
    rng = np.random.default_rng(seed)
    tokens, starts = list(rng.integers(3, 100, 3)), []
    for height, width in grids:
        tokens.append(IMAGES["vision_start_token_id"])
        starts.append(len(tokens))
        tokens += [IMAGES["image_token_id"]] * (height * width // MERGE**2)
        tokens += [IMAGES["vision_end_token_id"], *rng.integers(3, 100, 4)]
    patches = sum(height * width for height, width in grids)
    pixels = rng.normal(size=(patches, PATCH_VALUES)).astype(np.float32)
    grid_array = np.array([(1, *grid) for grid in grids], np.int32).reshape(-1, 3)
    return np.array(tokens, np.int32), Images(pixels, grid_array, np.array(starts, np.int32))


def packed(documents: tuple[tuple[Grid, ...], ...], seed: int = 0) -> Row:
    """Documents in a row, and padding."""
    parts = [document(grids, seed + index) for index, grids in enumerate(documents)]
    lengths = [len(tokens) for tokens, _ in parts]
    padding = SEQ_LEN - sum(lengths)
    firsts = np.cumsum([0, *lengths[:-1]])
    images = Images(
        np.concatenate([images.pixels for _, images in parts]),
        np.concatenate([images.grids for _, images in parts]),
        np.concatenate([images.starts + first for (_, images), first in zip(parts, firsts, strict=True)]),
    )
    zeros = np.zeros(SEQ_LEN, np.float32)
    mask = np.arange(SEQ_LEN) < SEQ_LEN - padding
    tokens = np.concatenate([*(tokens for tokens, _ in parts), np.zeros(padding, np.int32)])
    return Row(
        token_ids=tokens,
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in (*lengths, padding)]),
        mask=mask & (tokens < 100),
        logprobs=zeros,
        advantages=zeros,
        temperatures=zeros + 1,
        on_policy=zeros.astype(bool),
        images=images,
    )


def vlm_recipe(path: Path, trainer: dict[str, Any] | None = None, freeze: bool = True) -> Recipe:
    """A recipe that trains on images."""
    model = {"path": str(path), "dtype": "float32", "vlm": {"freeze_vision_encoder": freeze}}
    return make_recipe(path, model=model, **({"trainer": trainer} if trainer else {}))


def logits(policy: Policy, *rows: Row) -> torch.Tensor:
    tokens, positions = (torch.from_numpy(np.stack([getattr(r, n) for r in rows])) for n in ("token_ids", "positions"))
    images = vision_input(rows, policy.model.vision, policy.device)
    with torch.no_grad():
        return policy.logits(tokens.long(), positions.long(), images=images)[0]


@pytest.mark.parametrize("case", SEEING, ids=lambda case: case.name)
def test_logits_with_images_equal_those_of_transformers(case: Case, world: World, tmp_path: Path) -> None:
    path = write(case, tmp_path)
    found = logits(build(vlm_recipe(path), world), packed(DOCUMENTS), packed(DOCUMENTS[1:], 7))
    reference = reference_of(case).from_pretrained(path, dtype=torch.float32).eval()
    for row, (documents, seed) in enumerate(((DOCUMENTS, 0), (DOCUMENTS[1:], 7))):
        first = 0
        for index, grids in enumerate(documents):
            tokens, images = document(grids, seed + index)
            ids = torch.from_numpy(tokens).long()[None]
            options: dict[str, Any] = {
                "pixel_values": torch.from_numpy(images.pixels),
                "image_grid_thw": torch.from_numpy(images.grids).long(),
                "mm_token_type_ids": (ids == IMAGES["image_token_id"]).int(),
            }
            with torch.no_grad():
                expected = reference(ids, **(options if grids else {})).logits[0]
            part = found[row, first : first + len(tokens)]
            assert expected.abs().max() > 0.5
            assert (part - expected).abs().max() < case.tolerance, (row, index)
            first += len(tokens)
