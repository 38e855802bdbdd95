"""Images with random damage are decoded, or raise an error with their name."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from primeslurm.trainer.data.image_reader import FORMATS, _decoded, _naming
from tests.unit.fuzz.mutations import fuzzed, texts

PIXELS = np.random.default_rng(0).integers(0, 255, (33, 40, 3), dtype=np.uint8)


def stored(kind: str, mode: str = "RGB") -> bytes:
    actual = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(actual, kind)
    return actual.getvalue()


SEEDS = [stored(kind) for kind in FORMATS] + [stored("PNG", "RGBA"), stored("PNG", "P"), stored("WEBP", "RGBA")]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind: str) -> None:
    assert _decoded(stored(kind)).mode == "RGB"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@fuzzed(20)
@given(st.sampled_from(SEEDS).flatmap(texts))
def test_damaged_images_raise_errors_with_their_name(data: bytes) -> None:
    actual = "image photo: "
    try:
        with _naming("photo"):
            actual = _decoded(data).mode
    except ValueError as error:
        actual = str(error)[: len(actual)]
    assert actual in ("RGB", "image photo: ")


def test_formats_decoded_by_external_programs_are_rejected() -> None:
    with pytest.raises(ValueError, match="not an image of a supported format"), _naming("photo"):
        _decoded(stored("EPS"))


def test_errors_of_all_decoders_are_handled() -> None:
    """Pillow's AVIF decoder raises RuntimeError."""
    actual, whole = [], stored("AVIF")
    for place in range(0, len(whole) - 8, 8):
        try:
            with _naming("photo"):
                _decoded(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
        except ValueError as error:
            actual.append(type(error.__cause__))
    assert RuntimeError in actual


def test_decompression_bomb_is_rejected_before_decoding() -> None:
    header = stored("PNG")
    bomb = header[:16] + (60_000).to_bytes(4, "big") * 2 + header[24:]
    with pytest.raises(ValueError, match="image photo"), _naming("photo"):
        _decoded(bomb)
