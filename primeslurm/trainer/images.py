"""Where the images of packed rows are, and what the model needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence

from primeslurm.trainer import compat  # noqa: F401  isort: skip  (before torchtitan)
import numpy as np
import torch

from primeslurm.trainer.models.vision import VisionEncoder, VisionInput
from primeslurm.wire.rollouts import Images, Int32, Row


def vision_input(rows: Sequence[Row], encoder: VisionEncoder, device: torch.device) -> VisionInput:
    """The images of some rows together. Without any, the encoder gets a blank one, whose features nothing reads."""
    merge = encoder.merge
    found = [row.images for row in rows if row.images is not None and len(row.images.starts)]
    pixels = [images.pixels for images in found] or [np.zeros((merge**2, encoder.patch_values), np.float32)]
    grids = [images.grids for images in found] or [np.array([[1, merge, merge]], np.int32)]
    features, coordinates, used = [], [], 0
    for row in rows:
        placed, spread = place(row.positions, row.images, merge)
        features.append(np.where(placed < 0, -1, placed + used))
        coordinates.append(spread)
        used += int((placed >= 0).sum())
    return VisionInput(
        pixels=torch.from_numpy(np.concatenate(pixels)).to(device),
        grids=torch.from_numpy(np.concatenate(grids)).long().to(device),
        features=torch.from_numpy(np.stack(features)).long().to(device),
        coordinates=torch.from_numpy(np.stack(coordinates)).long().to(device),
    )


def place(positions: Int32, images: Images | None, merge: int) -> tuple[Int32, Int32]:
    """What each token of a packed row stands for, and where it is.

    An image takes as many positions as it has tokens in height or in width, whichever is more: fewer than it has
    tokens, so that what comes after it in its document moves up.

    Args:
        positions: [length], restarting at 0 with every document.
        merge: a token stands for so many patches in height, and as many in width.

    Returns:
        [length], the number of the feature that a token stands for, counted through all images; -1 for text. [length,
        3], its positions in time, height and width.
    """
    features = np.full(len(positions), -1, np.int32)
    coordinates = np.repeat(positions[:, None], 3, axis=1)
    if images is None:
        return features, coordinates
    begins = np.flatnonzero(positions == 0)
    used = 0
    for start, (_, height, width) in zip(images.starts, images.grids // (1, merge, merge), strict=True):
        count = int(height * width)
        end = start + count
        features[start:end] = np.arange(used, used + count)
        used += count
        row, column = np.divmod(np.arange(count), width)
        coordinates[start:end] = coordinates[start] + np.stack([np.zeros_like(row), row, column], axis=1)
        later = begins[begins > start]
        coordinates[end : later[0] if len(later) else None] -= count - max(height, width)
    return features, coordinates
