"""Fetches the next batch while the step before it runs, on a thread and a connection of its own."""

from __future__ import annotations

import logging
import threading

from primeslurm.records.heartbeats import liveness
from primeslurm.wire.batches.rollouts import Batch, RankShard
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink, TransferWanted

log = logging.getLogger(__name__)

LOOK_S = 1.0


class _Fetch:
    """One batch on its way."""

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
        """Fetch no more, but what is coming already: until it is there."""
        self._cancelled.set()
        while self._link.receiving and self._thread.is_alive():
            liveness().heartbeat()
            self._thread.join(LOOK_S)

    def cancel(self) -> None:
        """Fetch no more."""
        self._cancelled.set()

    def _run(self) -> None:
        try:
            self.batch = self._link.get_batch(
                self.step, self._shard, self._timeout_s, self._cancelled.is_set, ahead=True
            )
        except TransferWanted:
            self.transfer_wanted = True
        except LinkError as error:  # who waits for the batch asks again
            log.warning("the batch of step %d could not be fetched ahead: %s", self.step, error)
        finally:
            self._link.close()


class Prefetch:
    """At most one batch ahead.

    Args:
        link: to the orchestrator; another one is opened beside it.
        shard: of each batch, that this rank trains.
        timeout_s: a batch may take so long to be formed.
    """

    def __init__(self, link: TrainerLink, shard: RankShard, timeout_s: float) -> None:
        self._link = link
        self._shard = shard
        self._timeout_s = timeout_s
        self._fetch: _Fetch | None = None

    def begin(self, step: int) -> None:
        """Start to fetch the batch of `step`, in place of any other."""
        self.cancel()
        self._fetch = _Fetch(self._link.beside(), step, self._shard, self._timeout_s)

    def take(self, step: int) -> Batch | None:
        """Return the batch of `step`, and fetch no more. None: it has to be asked for.

        Raises:
            TransferWanted: engines have to be sent the policy first.
        """
        fetch, self._fetch = self._fetch, None
        if fetch is None or fetch.step != step:
            return None
        fetch.end()
        if fetch.transfer_wanted:
            raise TransferWanted
        return fetch.batch

    def cancel(self) -> None:
        """Fetch no more."""
        if self._fetch is not None:
            self._fetch.cancel()
            self._fetch = None
