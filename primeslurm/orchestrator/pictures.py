"""Images of rollouts: as files of the run, each once, however many rollouts have seen it."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec

from primeslurm.orchestrator.jobs import RolloutFailed
from primeslurm.wire.files import write_atomic
from primeslurm.wire.rollouts import Picture, Rollout

_INLINE = "data:image/"


def stored(rollout: Rollout, directory: Path) -> Rollout:
    """The rollout with its images, which are data URIs, as files of `directory`, named by what is in them.

    Raises:
        RolloutFailed: an image is none.
        OSError: a file cannot be written.
    """
    if not rollout.info.pictures:
        return rollout
    pictures = tuple(_as_file(picture, directory) for picture in rollout.info.pictures)
    return replace(rollout, info=msgspec.structs.replace(rollout.info, pictures=pictures))


def _as_file(picture: Picture, directory: Path) -> Picture:
    data = _data(picture.source)
    digest = hashlib.sha256(data).hexdigest()
    path = directory / digest
    if not path.exists():
        directory.mkdir(exist_ok=True)
        write_atomic(path, data)
    return msgspec.structs.replace(picture, source=str(path), sha256=digest)


def _data(source: str) -> bytes:
    if not source.startswith(_INLINE):
        raise RolloutFailed(f"an image must be a data URI, not {source[:80]}")
    try:
        return base64.b64decode(source.partition(",")[2], validate=True)
    except binascii.Error as error:
        raise RolloutFailed(f"an image is no base64: {error}") from error
