"""Images as data URIs."""

from __future__ import annotations

import base64
import re

import pytest

from primeslurm.wire.batches.inline_images import decode, is_inline, shown

DATA = bytes(range(256))


def test_image_is_decoded_with_and_without_line_breaks() -> None:
    for text in (base64.b64encode(DATA), base64.encodebytes(DATA)):
        source = "data:image/png;base64," + text.decode()
        assert is_inline(source) and decode(source) == DATA


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("images/a.png", "images/a.png: an image must be a data URI"),
        ("data:text/plain;base64,QUFB", "data:text/plain;base64,QUFB: an image must be a data URI"),
        ("data:image/svg+xml,<svg/>", "data:image/svg+xml,<svg/>: an image must be in base64"),
        ("data:image/png;base64,QUF", "data:image/png;base64,QUF: an image has invalid base64: Incorrect padding"),
        ("data:image/png;base64,Q*F=", "an image has invalid base64: "),
        ("data:image/png;base64", "an image must be in base64"),
    ],
)
def test_invalid_image_is_named_in_the_error(source: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        decode(source)


def test_data_uris_are_shortened_in_messages() -> None:
    path, source = "a/" * 100, "data:image/png;base64," + "A" * 1000
    assert shown(path) == path and shown("data:image/png,A") == "data:image/png,A"
    assert len(shown(source)) == 83 and source.startswith(shown(source).removesuffix("..."))
    with pytest.raises(ValueError, match="an image has invalid base64") as raised:
        decode(source + "*")
    assert len(str(raised.value)) < 200
