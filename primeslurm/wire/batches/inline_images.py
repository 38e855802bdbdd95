"""Images in token sequences, named by a file or given as a data URI: `data:image/png;base64,...`."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec

from primeslurm.wire.decoding import Count

_START = "data:image/"
_SHOWN = 80  # characters of a data URI that messages show


class ImageSpan(msgspec.Struct, frozen=True):
    """An image and its tokens in a sequence. The trainer decodes the image."""

    source: str  # path of a file, or a data URI
    start: Count  # index of the image's first token
    end: Count  # index after the image's last token
    sha256: str | None = None  # Digest of the encoded image in hex. None: not computed yet.

    def moved(self, by: int) -> ImageSpan:
        return msgspec.structs.replace(self, start=self.start + int(by), end=self.end + int(by))


def whole(images: Sequence[ImageSpan], length: int) -> tuple[int, tuple[ImageSpan, ...]]:
    """Return the largest cut up to `length` [tokens] that splits no image, and the images before the cut."""
    for image in images:
        if image.start < length < image.end:
            length = image.start
    return length, tuple(image for image in images if image.end <= length)


def is_inline(source: str) -> bool:
    return source.startswith(_START)


def shown(source: str) -> str:
    return source[:_SHOWN] + "..." if is_inline(source) and len(source) > _SHOWN else source


def decode(source: str) -> bytes:
    """Return the bytes of an image in a data URI, ignoring white space in its base64. Raise ValueError."""
    if not is_inline(source):
        raise ValueError(f"{source[:_SHOWN]}: an image must be a data URI (data:image/...)")
    kind, comma, text = source.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise ValueError(f"{shown(source)}: an image must be in base64 (data:image/...;base64,...)")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:  # includes binascii.Error
        raise ValueError(f"{shown(source)}: an image has invalid base64: {error}") from error
