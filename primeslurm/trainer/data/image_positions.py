"""Positions of images in packed rows, and the vision encoder's input."""

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
    """The decoded images of a row."""

    pixels: Float32  # patches of all images [patches, values]
    grids: Int32  # patches of each image in time, height and width [images, 3]
    starts: Int32  # index of each image's first placeholder token [images], ascending


def read(row: Row, reader: ImageReader) -> Images | None:
    """Decode the images of a row. Return None if it has none. Raises as `ImageReader.read`."""
    if not row.images:
        return None
    pixels, grids = zip(*map(reader.read, row.images), strict=True)
    return Images(np.concatenate(pixels), np.stack(grids), np.array([image.start for image in row.images], np.int32))


def vision_input(
    rows: Sequence[Row], images: Sequence[Images | None], encoder: VisionEncoder, device: torch.device
) -> VisionInput:
    """Combine the images of a micro batch into the vision encoder's input. Rows without images have None."""
    merge = encoder.merge
    present = [each for each in images if each is not None]
    # Without any image the encoder gets a blank one, which no token reads: all ranks must run the encoder together.
    pixels = [each.pixels for each in present] or [np.zeros((merge**2, encoder.patch_values), np.float32)]
    grids = [each.grids for each in present] or [np.array([[1, merge, merge]], np.int32)]
    features, coordinates, used = [], [], 0
    for row, row_images in zip(rows, images, strict=True):
        row_features, row_coordinates = place(row.positions, row_images, merge)
        features.append(np.where(row_features < 0, -1, row_features + used))
        coordinates.append(row_coordinates)
        used += int((row_features >= 0).sum())
    return VisionInput(
        pixels=to_device(torch.from_numpy(np.concatenate(pixels)), device),
        grids=to_device(torch.from_numpy(np.concatenate(grids)).long(), device),
        features=to_device(torch.from_numpy(np.stack(features)).long(), device),
        coordinates=to_device(torch.from_numpy(np.stack(coordinates)).long(), device),
    )


def place(positions: Int32, images: Images | None, merge: int) -> tuple[Int32, Int32]:
    """Map each token of a packed row to an image feature and to its multimodal position.

    `positions` [length] restart at 0 with every document. `merge` is the number of patches per token in height and in
    width. Returns the index of each token's image feature [length], -1 for text, and its positions in time, height and
    width [length, 3].
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
        # An image advances positions by its longer side only (M-RoPE, Qwen2-VL), so the rest of the document moves up.
        later = begins[begins > start]
        coordinates[end : later[0] if len(later) else None] -= count - max(height, width)
    return features, coordinates
