"""Images of conversations: from files or data URIs to what a vision encoder takes."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import AutoImageProcessor

from primeslurm.base import files
from primeslurm.wire.batches import inline_images
from primeslurm.wire.batches.frames import Bool, Float32, Int32
from primeslurm.wire.batches.inline_images import ImageSpan

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO")
"""Of images, in Pillow's words. Others it reads by programs that whoever made the image may have written for (EPS, by
Ghostscript), or by decoders that hardly anybody uses."""


class ImageReader:
    """Decodes, scales and cuts images into patches, as the model's own image processor is set.

    Args:
        directory: of the model.
        token: the placeholder that the chat template renders once for each image.

    Raises:
        ValueError: the model directory has no settings of an image processor, or those of one that does not cut images
            into patches with a grid, as Qwen2-VL's does.
    """

    def __init__(self, directory: Path, token: int) -> None:
        self.token = token
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(directory)
        except OSError as error:
            raise ValueError(f"{directory}: no image processor (preprocessor_config.json)") from error
        if not hasattr(self._processor, "merge_size"):
            kind = type(self._processor).__name__
            raise ValueError(f"{directory}: its image processor ({kind}) does not cut images into patches with a grid")

    def tokens(self, source: str) -> int:
        """Count the tokens that stand for an image; decodes no more than its header.

        Raises:
            OSError, ValueError: the image cannot be read.
        """
        stored = io.BytesIO(inline_images.decode(source)) if inline_images.is_inline(source) else source
        with _naming(source), Image.open(stored, formats=_kinds()) as image:
            width, height = image.size
            patches = self._processor.get_number_of_image_patches(height, width, {})
        return int(patches) // self._processor.merge_size**2

    def read(self, image: ImageSpan) -> tuple[Float32, Int32]:
        """Decode an image.

        Returns:
            Its patches [patches, values], and how many there are in time, height and width [3].

        Raises:
            OSError, ValueError: the image cannot be read, or it is not the one that the tokens were made of.
        """
        source = image.source
        data = inline_images.decode(source) if inline_images.is_inline(source) else files.read_bytes(Path(source))
        with _naming(source):
            if image.sha256 is not None and hashlib.sha256(data).hexdigest() != image.sha256:
                raise ValueError("it has changed since the rollout")
            made = self._processor(images=[_decoded(data)], return_tensors="np")
        pixels, grid = made["pixel_values"], made["image_grid_thw"][0]
        tokens, wanted = len(pixels) // self._processor.merge_size**2, image.end - image.start
        if tokens != wanted:
            why = "it has changed, or engines and trainer have different image processors"
            raise ValueError(f"image {inline_images.shown(source)}: {wanted} tokens stand for it, not {tokens}: {why}")
        return pixels.astype(np.float32), grid.astype(np.int32)


def expand(
    token_ids: Int32, mask: Bool, sources: Sequence[str], directory: Path, reader: ImageReader
) -> tuple[Int32, Bool, tuple[ImageSpan, ...]]:
    """Repeat each placeholder as often as its image has tokens; none of these are trained.

    Args:
        token_ids: [n_tokens] of a conversation, with one placeholder an image.
        mask: [n_tokens], whether each is trained.
        sources: its images in order.
        directory: paths of images are relative to it.
        reader: knows the placeholder, and how many tokens an image has.

    Returns:
        Token ids and mask with every placeholder repeated, and where the images are.

    Raises:
        OSError, ValueError: an image cannot be read, or there are more or fewer placeholders than images.
    """
    places = np.flatnonzero(token_ids == reader.token)
    if len(places) != len(sources):
        raise ValueError(f"{len(sources)} images, but the chat template renders placeholders for {len(places)}")
    found = [source if inline_images.is_inline(source) else str(directory / source) for source in sources]
    counts = np.ones(len(token_ids), np.int64)
    counts[places] = [reader.tokens(source) for source in found]
    ends = np.cumsum(counts)
    images = tuple(
        ImageSpan(source, int(ends[place] - counts[place]), int(ends[place]))
        for source, place in zip(found, places, strict=True)
    )
    repeated = np.repeat(token_ids, counts)
    return repeated, np.repeat(mask, counts) & (repeated != reader.token), images


@functools.cache
def _kinds() -> list[str]:
    """Those that this Pillow was built with."""
    Image.init()
    return [kind for kind in KINDS if kind in Image.OPEN]


def _decoded(data: bytes) -> Image.Image:
    """An image as engines see it. Raises what Pillow raises if it is none."""
    with Image.open(io.BytesIO(data), formats=_kinds()) as image:
        return _on_white(ImageOps.exif_transpose(image))


def _on_white(image: Image.Image) -> Image.Image:
    """In RGB; what is behind a transparent image is white."""
    if image.mode == "RGB" or not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    opaque = Image.new("RGB", image.size, "white")
    opaque.paste(image, mask=image.getchannel("A"))
    return opaque


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """What goes wrong with an image, with its source. A missing file's error has it already."""
    try:
        yield
    except FileNotFoundError:
        raise
    except UnidentifiedImageError as error:  # says which object, not which file
        raise ValueError(f"image {inline_images.shown(source)}: no image of a known kind") from error
    except (OSError, SyntaxError, ValueError, RuntimeError, Image.DecompressionBombError) as error:  # each in its way
        raise ValueError(f"image {inline_images.shown(source)}: {error}") from error
