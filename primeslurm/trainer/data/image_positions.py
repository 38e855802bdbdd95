"""Where the images of packed rows are, and what the model needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from primeslurm.nn.layers.vision import VisionEncoder, VisionInput
from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.trainer.distributed.world import to_device
from primeslurm.wire.batches.batch import Row
from primeslurm.wire.batches.frames import Float32, Int32


@dataclass(frozen=True)
class Images:
    """The images of a row, as a vision encoder takes them."""

    pixels: Float32
    """[patches, values], the patches of all images one after the other."""
    grids: Int32
    """[images, 3]: how many patches each has in time, height and width."""
    starts: Int32
    """[images]: index of the first of the tokens that stand for each, in ascending order."""


def read(row: Row, reader: ImageReader) -> Images | None:
    """Decode the images of a row, if it has any.

    Raises:
        OSError, ValueError: as for `ImageReader.read`.
    """
    if not row.images:
        return None
    pixels, grids = zip(*map(reader.read, row.images), strict=True)
    return Images(np.concatenate(pixels), np.stack(grids), np.array([image.start for image in row.images], np.int32))


def vision_input(
    rows: Sequence[Row], images: Sequence[Images | None], encoder: VisionEncoder, device: torch.device
) -> VisionInput:
    """Put the images of some rows together. Without any, the encoder gets a blank one, which nothing reads.

    Args:
        rows: whose tokens are placed.
        images: of each row; None for a row without any.
        encoder: says how patches become tokens.
        device: where the result is computed with.
    """
    merge = encoder.merge
    found = [one for one in images if one is not None]
    pixels = [one.pixels for one in found] or [np.zeros((merge**2, encoder.patch_values), np.float32)]
    grids = [one.grids for one in found] or [np.array([[1, merge, merge]], np.int32)]
    features, coordinates, used = [], [], 0
    for row, one in zip(rows, images, strict=True):
        placed, spread = place(row.positions, one, merge)
        features.append(np.where(placed < 0, -1, placed + used))
        coordinates.append(spread)
        used += int((placed >= 0).sum())
    return VisionInput(
        pixels=to_device(torch.from_numpy(np.concatenate(pixels)), device),
        grids=to_device(torch.from_numpy(np.concatenate(grids)).long(), device),
        features=to_device(torch.from_numpy(np.stack(features)).long(), device),
        coordinates=to_device(torch.from_numpy(np.stack(coordinates)).long(), device),
    )


def place(positions: Int32, images: Images | None, merge: int) -> tuple[Int32, Int32]:
    """Find what each token of a packed row stands for, and where it is.

    An image takes as many positions as it has tokens in height or in width, whichever is more: fewer than it has
    tokens, so that what comes after it in its document moves up.

    Args:
        positions: [length], restarting at 0 with every document.
        images: of the row; None if it has none.
        merge: a token stands for so many patches in height, and as many in width.

    Returns:
        [length], the number of the feature that a token stands for, counted through all images; -1 for text.
        [length, 3], its positions in time, height and width.
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
