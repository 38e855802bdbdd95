"""Fetch the next batch during the current step, on a thread and connection of its own."""

from __future__ import annotations

import logging
import threading

from primeslurm.records.heartbeats import liveness
from primeslurm.wire.batches.batch import Batch, RankShard
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink, TransferWanted

log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0


class _Fetch:
    """A batch that is being fetched."""

    def __init__(self, link: TrainerLink, step: int, shard: RankShard, timeout_s: float) -> None:
        self.step = step
        self.batch: Batch | None = None
        self.transfer_wanted = False
        self._link = link
        self._shard = shard
        self._timeout_s = timeout_s
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Cancel the request. If its answer is already arriving, wait for all of it."""
        self.cancel()
        while self._link.receiving and self._thread.is_alive():
            liveness().heartbeat()
            self._thread.join(_HEARTBEAT_S)

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> None:
        try:
            self.batch = self._link.get_batch(
                self.step, self._shard, self._timeout_s, self._cancelled.is_set, ahead=True
            )
        except TransferWanted:
            self.transfer_wanted = True
        except LinkError as error:  # the training loop asks again
            log.warning("cannot prefetch the batch of step %d: %s", self.step, error)
        finally:
            self._link.close()


class Prefetch:
    """Prefetches at most one batch of this rank's shard, within `timeout_s` [s], on another connection like `link`."""

    def __init__(self, link: TrainerLink, shard: RankShard, timeout_s: float) -> None:
        self._link = link
        self._shard = shard
        self._timeout_s = timeout_s
        self._fetch: _Fetch | None = None

    def begin(self, step: int) -> None:
        """Start to fetch the batch of `step`, and cancel any other fetch."""
        self.cancel()
        self._fetch = _Fetch(self._link.beside(), step, self._shard, self._timeout_s)

    def take(self, step: int) -> Batch | None:
        """Return the batch of `step`, or None if it was not prefetched. Raises TransferWanted as `get_batch` does."""
        fetch, self._fetch = self._fetch, None
        if fetch is None or fetch.step != step:
            return None
        fetch.end()
        if fetch.transfer_wanted:
            raise TransferWanted
        return fetch.batch

    def cancel(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()
            self._fetch = None
