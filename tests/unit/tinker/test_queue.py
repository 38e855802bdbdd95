"""Order, retries and failures of requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations

import pytest

from primeslurm.tinker import queue
from primeslurm.tinker.queue import InOrder, Requests, Result
from primeslurm.tinker.requests import RequestError


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_requests_run_in_order_however_they_arrive(worker: ThreadPoolExecutor) -> None:
    for arrival in permutations([1, 2, 3, 4]):
        requests, order, executed = Requests(worker), InOrder(), list[int]()

        def action(number: int, executed: list[int] = executed) -> Result:
            executed.append(number)
            return {"number": number}

        for number in [*arrival, *arrival]:  # each is sent twice
            requests.submit(str(number), partial(action, number), number, order)
        assert [requests.future(str(number)).result(10) for number in arrival] == [{"number": n} for n in arrival]
        assert executed == [1, 2, 3, 4]


def test_failures_are_results(worker: ThreadPoolExecutor) -> None:
    requests = Requests(worker)

    def fail(error: Exception) -> Result:
        raise error

    requests.submit("user", partial(fail, RequestError("rank", 9, "is too large")))
    requests.submit("server", partial(fail, ValueError("broken")))
    assert requests.future("user").result(10) == {"error": "rank = 9: is too large", "category": "user"}
    assert requests.future("server").result(10) == {"error": "ValueError: broken", "category": "server"}


def test_old_results_are_forgotten(worker: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "RETRIEVED", 1)
    requests, order = Requests(worker), InOrder()
    for number in (1, 2):
        requests.submit(f"run:{number}", dict, number, order)
        requests.future(f"run:{number}").result(10)
        requests.retrieved(f"run:{number}")
        requests.retrieved(f"run:{number}")
    with pytest.raises(RequestError, match="run:1: is unknown"):
        requests.future("run:1")
    with pytest.raises(RequestError, match="seq_id = 1: is in the past; the next one is 3"):
        requests.submit("run:1", dict, 1, order)
    requests.forget("run:")
    with pytest.raises(RequestError, match="its session ended"):
        requests.future("run:2")
