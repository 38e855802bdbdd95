"""Write the trainer's log-probabilities of archived rollouts to the run directory, for people to read.

Each rank writes what it has computed, in a thread, after the step. A failure is logged and changes nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primeslurm.base import durable, files
from primeslurm.records import rollout_files
from primeslurm.wire.batches.batch import BatchInfo

log = logging.getLogger(__name__)
# How long an operation of an unavailable file system is retried [s].
_RETRY_S = 5.0


class KeptLogprobs:
    """Collects the log-probabilities of archived rollouts during a step, and writes them after it."""

    def __init__(self, run_dir: Path, attempt: int, rank: int) -> None:
        self._run_dir, self._attempt, self._rank = run_dir, attempt, rank
        self._thread = ThreadPoolExecutor(1, "kept-logprobs")
        self._collected: list[tuple[int, Any, torch.Tensor]] = []

    def add(self, info: BatchInfo, first_row: int, mask: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Collect the log-probabilities of a micro batch.

        Args:
            first_row: index of the micro batch's first row among the rank's rows.
            mask: positions that predict a trained token [rows, local_len], in host memory.
            logprobs: of these positions, in their order [trained tokens].
        """
        rows, local_len = mask.shape
        ends = np.cumsum(mask.sum(dim=1).numpy())
        for kept in info.kept:
            row = kept.row - first_row
            if not 0 <= row < rows:
                continue
            places = np.flatnonzero(mask[row].numpy())
            # A position predicts the token after it. Positions are those of this rank's shard of the row.
            tokens = places + info.cp_rank * local_len + 1 - kept.start + kept.prefix
            first, last = np.searchsorted(tokens, (kept.prefix, kept.length))
            if first < last:
                begin = int(ends[row]) - len(places)
                values = logprobs.detach()[begin + first : begin + last].clone()
                self._collected.append((kept.number, tokens[first:last], values))

    def write(self, step: int) -> None:
        """Write what was collected for a step. Returns at once."""
        collected, self._collected = self._collected, []
        if collected:
            values = [(number, tokens, logprobs.float().cpu().numpy()) for number, tokens, logprobs in collected]
            self._thread.submit(self._write, step, values)

    def _write(self, step: int, values: Sequence[tuple[int, Any, Any]]) -> None:
        path = rollout_files.logprobs_path(self._run_dir, step, self._attempt, self._rank)
        try:
            with files.within(_RETRY_S):
                durable.make_directory(path.parent)
                data = rollout_files.encode_logprobs(values)
                why = durable.write_bulk(path, lambda: durable.write(path, data))
        except Exception as error:  # nobody looks at the thread's results
            why = f"{type(error).__name__}: {error}"
        if why:
            log.warning("cannot write the log-probabilities of archived rollouts of step %d: %s", step, why)
