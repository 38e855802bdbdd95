"""Read images of conversations from files or data URIs, and cut them into patches for the vision encoder."""

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

# Accepted image formats, as Pillow names them. Pillow reads others with rarely used decoders or external programs (EPS
# with Ghostscript), which a malicious image could exploit.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO")


class ImageReader:
    """Decodes images and cuts them into patches with the model's own image processor.

    `token` is the placeholder that the chat template renders once per image. Raises ValueError if the image processor
    is missing, or does not produce patches with a grid as Qwen2-VL's does.
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
        """Return the number of tokens of an image. Reads only its header. Raises OSError or ValueError."""
        stored = io.BytesIO(inline_images.decode(source)) if inline_images.is_inline(source) else source
        with _naming(source), Image.open(stored, formats=_formats()) as image:
            width, height = image.size
            patches = self._processor.get_number_of_image_patches(height, width, {})
        return int(patches) // self._processor.merge_size**2

    def read(self, image: ImageSpan) -> tuple[Float32, Int32]:
        """Decode an image. Return its patches [patches, values], and their number in time, height and width [3].

        Raises OSError or ValueError if the image cannot be read, or is not the one that the tokens were made from.
        """
        source = image.source
        data = inline_images.decode(source) if inline_images.is_inline(source) else files.read_bytes(Path(source))
        with _naming(source):
            if image.sha256 is not None and hashlib.sha256(data).hexdigest() != image.sha256:
                raise ValueError("it has changed since the rollout")
            processed = self._processor(images=[_decoded(data)], return_tensors="np")
        pixels, grid = processed["pixel_values"], processed["image_grid_thw"][0]
        tokens, expected = len(pixels) // self._processor.merge_size**2, image.end - image.start
        if tokens != expected:
            why = "the image has changed, or engines and trainer have different image processors"
            raise ValueError(f"image {inline_images.shown(source)}: {tokens} tokens, expected {expected}: {why}")
        return pixels.astype(np.float32), grid.astype(np.int32)


def expand(
    token_ids: Int32, mask: Bool, sources: Sequence[str], directory: Path, reader: ImageReader
) -> tuple[Int32, Bool, tuple[ImageSpan, ...]]:
    """Repeat each placeholder token once per token of its image. Image tokens are not trained.

    `token_ids` and `mask` (trained tokens) are [n_tokens]. `sources` are data URIs, or paths relative to `directory`.
    Returns the expanded token ids and mask, and the span of each image. Raises OSError or ValueError if an image cannot
    be read, or if the numbers of placeholders and images differ.
    """
    places = np.flatnonzero(token_ids == reader.token)
    if len(places) != len(sources):
        raise ValueError(f"{len(sources)} images, but the chat template renders placeholders for {len(places)}")
    paths = [source if inline_images.is_inline(source) else str(directory / source) for source in sources]
    counts = np.ones(len(token_ids), np.int64)
    counts[places] = [reader.tokens(source) for source in paths]
    ends = np.cumsum(counts)
    images = tuple(
        ImageSpan(source, int(ends[place] - counts[place]), int(ends[place]))
        for source, place in zip(paths, places, strict=True)
    )
    repeated = np.repeat(token_ids, counts)
    return repeated, np.repeat(mask, counts) & (repeated != reader.token), images


@functools.cache
def _formats() -> list[str]:
    Image.init()
    return [each for each in FORMATS if each in Image.OPEN]  # the formats that this Pillow was built with


def _decoded(data: bytes) -> Image.Image:
    """Decode an image as engines do: RGB, rotated by its EXIF tag, with transparency on white."""
    with Image.open(io.BytesIO(data), formats=_formats()) as opened:
        image = ImageOps.exif_transpose(opened)
    if image.mode == "RGB" or not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    opaque = Image.new("RGB", image.size, "white")
    opaque.paste(image, mask=image.getchannel("A"))
    return opaque


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Convert errors of the `with` body to a ValueError that names the image's source."""
    try:
        yield
    except FileNotFoundError:
        raise  # names the file already
    except UnidentifiedImageError as error:  # names a Python object, not the file
        raise ValueError(f"image {inline_images.shown(source)}: not an image of a supported format") from error
    except (OSError, SyntaxError, ValueError, RuntimeError, Image.DecompressionBombError) as error:  # one per decoder
        raise ValueError(f"image {inline_images.shown(source)}: {error}") from error
