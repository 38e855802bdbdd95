"""Pictures of conversations: from files or data URIs to what a vision encoder takes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import AutoImageProcessor

from primeslurm.wire import data_uri
from primeslurm.wire.rollouts import Bool, Float32, Int32, Picture


class PictureReader:
    """Decodes, scales and cuts images into patches, as the model's own image processor is set.

    Args:
        directory: of the model.
        token: the placeholder that the chat template renders once for each image.

    Raises:
        ValueError: the model directory has no settings of an image processor.
    """

    def __init__(self, directory: Path, token: int) -> None:
        self.token = token
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(directory)
        except OSError as error:
            raise ValueError(f"{directory}: no image processor (preprocessor_config.json)") from error

    def tokens(self, source: str) -> int:
        """How many tokens stand for an image; decodes no more than its header.

        Raises:
            OSError: the image cannot be read.
            ValueError: it is a data URI that cannot be decoded.
        """
        with _open(source) as image:
            width, height = image.size
        patches = self._processor.get_number_of_image_patches(height, width, {})
        return int(patches) // self._processor.merge_size**2

    def read(self, picture: Picture) -> tuple[Float32, Int32]:
        """The patches of an image [patches, values], and how many there are in time, height and width.

        Raises:
            OSError: the image cannot be read.
            ValueError: it is not the image that was there when the conversation was tokenized, or is a data URI that
                cannot be decoded.
        """
        with _open(picture.source) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        made = self._processor(images=[upright], return_tensors="np")
        pixels, grid = made["pixel_values"], made["image_grid_thw"][0]
        if len(pixels) // self._processor.merge_size**2 != picture.end - picture.start:
            raise ValueError(f"{data_uri.shown(picture.source)}: has changed its size since training began")
        return pixels.astype(np.float32), grid.astype(np.int32)


def expand(
    token_ids: Int32, mask: Bool, sources: Sequence[str], directory: Path, reader: PictureReader
) -> tuple[Int32, Bool, tuple[Picture, ...]]:
    """Repeat each placeholder as often as its image has tokens; none of these are trained.

    Args:
        token_ids, mask: of a conversation, with one placeholder an image.
        sources: its images in order; paths are relative to `directory`.

    Raises:
        OSError: an image cannot be read.
        ValueError: there are more or fewer placeholders than images, or a data URI cannot be decoded.
    """
    places = np.flatnonzero(token_ids == reader.token)
    if len(places) != len(sources):
        raise ValueError(f"{len(sources)} images, but the chat template renders placeholders for {len(places)}")
    found = [source if data_uri.is_inline(source) else str(directory / source) for source in sources]
    counts = np.ones(len(token_ids), np.int64)
    counts[places] = [reader.tokens(source) for source in found]
    ends = np.cumsum(counts)
    pictures = tuple(
        Picture(source, int(ends[place] - counts[place]), int(ends[place]))
        for source, place in zip(found, places, strict=True)
    )
    repeated = np.repeat(token_ids, counts)
    return repeated, np.repeat(mask, counts) & (repeated != reader.token), pictures


def _open(source: str) -> Image.Image:
    if not data_uri.is_inline(source):
        return Image.open(source)
    try:
        return Image.open(io.BytesIO(data_uri.decode(source)))
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"cannot identify image {data_uri.shown(source)}") from None
