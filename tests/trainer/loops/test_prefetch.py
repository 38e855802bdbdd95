"""Prefetching of batches."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from primeslurm.trainer.loops.rl import Prefetch
from primeslurm.wire.batches.batch import Batch, RankShard
from primeslurm.wire.link.trainer_link import TransferWanted
from tests.trainer.conftest import make_batch


class Link:
    """A fake link that returns `answer` once `formed` is set."""

    def __init__(self, answer: Batch | Exception | None = None) -> None:
        self.answer = answer
        self.formed = threading.Event()
        self.coming = threading.Event()
        self.receiving = False
        self.asked: list[int] = []
        self.closed = threading.Event()

    def beside(self) -> Link:
        return self

    def get_batch(self, step: int, *where: object, **how: object) -> Batch | None:
        self.asked.append(step)
        interrupted = where[2]
        assert callable(interrupted) and where[0] == RankShard(0, 1, 1, 2) and how == {"ahead": True}
        while not self.formed.wait(0.01):
            if interrupted():
                return None
        self.receiving = True
        self.coming.wait(60)
        self.receiving = False
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed.set()


def prefetch(link: Link) -> Prefetch:
    return Prefetch(link, RankShard(0, 1, 1, 2), 60)  # type: ignore[arg-type]


def test_arriving_batch_is_waited_for() -> None:
    link = Link(batch := make_batch(2))
    ahead = prefetch(link)
    ahead.begin(2)
    link.formed.set()
    while not link.receiving:
        time.sleep(0.01)
    threading.Timer(0.2, link.coming.set).start()
    assert ahead.take(2) is batch and link.asked == [2]
    assert ahead.take(2) is None, "it is given once"


def test_unformed_batch_is_not_waited_for() -> None:
    ahead = prefetch(link := Link(make_batch(2)))
    ahead.begin(2)
    assert ahead.take(2) is None
    assert link.closed.wait(60), "nor asked for any more"


def test_wait_ends_with_the_batch_or_with_the_publication() -> None:
    ahead, publication = prefetch(link := Link(batch := make_batch(2))), Future[None]()
    link.coming.set()
    ahead.begin(2)
    threading.Timer(0.2, link.formed.set).start()
    ahead.wait(publication, 60)
    assert not publication.done() and ahead.take(2) is batch
    ahead = prefetch(Link(batch))
    ahead.begin(2)
    threading.Timer(0.2, publication.set_result, [None]).start()
    ahead.wait(publication, 60)
    assert publication.done() and ahead.take(2) is None


def test_batch_of_another_step_is_not_returned() -> None:
    ahead = prefetch(link := Link(make_batch(2)))
    link.formed.set()
    link.coming.set()
    ahead.begin(2)
    assert link.closed.wait(60)
    assert ahead.take(3) is None


def test_wanted_transfer_is_raised() -> None:
    ahead = prefetch(link := Link(TransferWanted()))
    link.formed.set()
    link.coming.set()
    ahead.begin(2)
    assert link.closed.wait(60)
    with pytest.raises(TransferWanted):
        ahead.take(2)
