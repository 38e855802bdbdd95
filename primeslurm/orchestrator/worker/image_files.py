"""Images of rollouts as files of the run, each once, however many rollouts contain it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec

from primeslurm.base import durable, files
from primeslurm.orchestrator.rollouts.job_protocol import RolloutError
from primeslurm.wire.batches import inline_images
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.batches.rollout import Rollout


def stored(rollout: Rollout, directory: Path) -> Rollout:
    """Write a rollout's images, which are data URIs, to files named by their digest, and return it with their paths.

    Raise RolloutError if an image is invalid, and OSError if a file cannot be written.
    """
    if not rollout.info.images:
        return rollout
    images = tuple(_as_file(image, directory) for image in rollout.info.images)
    return replace(rollout, info=msgspec.structs.replace(rollout.info, images=images))


def _as_file(image: ImageSpan, directory: Path) -> ImageSpan:
    try:
        data = inline_images.decode(image.source)
    except ValueError as error:
        raise RolloutError(str(error)) from error
    digest = hashlib.sha256(data).hexdigest()
    path = directory / digest
    if not files.exists(path):
        durable.make_directory(directory)
        durable.write(path, data)
    return msgspec.structs.replace(image, source=str(path), sha256=digest)
