"""Images of rollouts: as files of the run, each once, however many rollouts have seen it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec

from primeslurm.files import write_atomic
from primeslurm.orchestrator.rollouts.job_protocol import RolloutFailed
from primeslurm.wire import data_uri
from primeslurm.wire.rollouts import Picture, Rollout


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
    try:
        data = data_uri.decode(picture.source)
    except ValueError as error:
        raise RolloutFailed(str(error)) from error
    digest = hashlib.sha256(data).hexdigest()
    path = directory / digest
    if not path.exists():
        directory.mkdir(exist_ok=True)
        write_atomic(path, data)
    return msgspec.structs.replace(picture, source=str(path), sha256=digest)
