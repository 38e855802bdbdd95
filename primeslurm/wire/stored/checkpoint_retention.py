"""The number of checkpoints that a run keeps (`checkpoint.keep`), and the deletion of older ones."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from primeslurm.base import durable, files
from primeslurm.wire.stored import checkpoints

log = logging.getLogger(__name__)


def prune(run_dir: Path, keep: int, needed: Collection[int] = ()) -> list[int]:
    """Delete committed checkpoints beyond the newest `keep`, and uncommitted ones older than the newest.

    Returns the deleted steps, ascending.
    """
    steps = checkpoints.committed(run_dir)
    if not steps:
        return []
    keep_steps = {*steps[-keep:], *needed}
    obsolete = [
        (step, path)
        for step, path in checkpoints.directories(files.listing(run_dir / "checkpoints"))
        if step not in keep_steps and step < steps[-1]
    ]
    # A directory without COMMITTED may be a checkpoint whose COMMITTED this node has not seen or read yet.
    if any(step not in steps and files.exists(path / checkpoints.COMMITTED) for step, path in obsolete):
        log.warning("no checkpoint is deleted now: COMMITTED of one that seemed to be a leftover is there")
        return []
    for _, path in obsolete:
        durable.remove(path / checkpoints.COMMITTED)
        files.remove_tree(path, ignore_errors=True)
    return [step for step, _ in obsolete]
