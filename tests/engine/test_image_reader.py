"""Trainer and engines decode image files identically."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.media.image import ImageMediaIO

from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.wire.batches.inline_images import ImageSpan
from tests.support.vision_models import image_token, make_vision_model

pytestmark = pytest.mark.engine


def noise(channels: int) -> Image.Image:
    """Return a random image of six tokens."""
    shape = (64, 96, channels) if channels > 1 else (64, 96)
    return Image.fromarray(np.random.default_rng(channels).integers(0, 256, shape, dtype=np.uint8))


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotate by 90 degrees
    return exif


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "colours": lambda: saved(noise(3)),
    "grey": lambda: saved(noise(1)),
    "transparent": lambda: saved(noise(4)),
    "transparent grey": lambda: saved(noise(2)),
    "a palette with a transparent colour": lambda: saved(noise(3).quantize(16), transparency=3),
    "one transparent colour": lambda: saved(noise(3), transparency=(1, 2, 3)),
    "printing colours": lambda: saved(noise(4).convert("RGB").convert("CMYK"), "JPEG"),
    "turned": lambda: saved(noise(3), "JPEG", exif=turned()),
    "frames": lambda: saved(noise(3), "GIF", save_all=True, append_images=[noise(3).rotate(180)]),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImageReader:
    """Return the reader of a vision-language model."""
    model = make_vision_model(tmp_path_factory.mktemp("model"), 0)
    return ImageReader(model, image_token(model))


@pytest.mark.parametrize("name", FILES)
def test_files_are_decoded_as_engines_decode_them(name: str, reader: ImageReader, tmp_path: Path) -> None:
    data = FILES[name]()
    (tmp_path / "image").write_bytes(data)
    (tmp_path / "engine.png").write_bytes(saved(ImageMediaIO().load_bytes(data).media))
    (pixels, grid), (expected, expected_grid) = (
        reader.read(ImageSpan(str(tmp_path / file), 0, 6)) for file in ("image", "engine.png")
    )
    assert grid.tolist() == expected_grid.tolist() and np.array_equal(pixels, expected)
