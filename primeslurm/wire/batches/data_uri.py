"""Images that stand in a message themselves, as data URIs: `data:image/png;base64,...`."""

from __future__ import annotations

import base64

_START = "data:image/"
_SHOWN = 80
"""So many characters say enough of a data URI; the rest would fill a log."""


def is_inline(source: str) -> bool:
    """Tell whether a source of an image is a data URI of one, and not the name of a file."""
    return source.startswith(_START)


def shown(source: str) -> str:
    """Shorten the source of an image to what messages name it by."""
    return source[:_SHOWN] + "..." if is_inline(source) and len(source) > _SHOWN else source


def decode(source: str) -> bytes:
    """The bytes of an image. Line breaks and spaces in its base64 mean nothing.

    Raises:
        ValueError: the source is no data URI of an image, or what it holds is not in base64.
    """
    if not is_inline(source):
        raise ValueError(f"{source[:_SHOWN]}: an image must be a data URI (data:image/...)")
    kind, comma, text = source.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise ValueError(f"{shown(source)}: an image must be in base64 (data:image/...;base64,...)")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:  # binascii's is one
        raise ValueError(f"{shown(source)}: an image is no base64: {error}") from error
