"""Order, retries and failures of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from itertools import permutations
from threading import Event

import pytest

from primeslurm.tinker import queue
from primeslurm.tinker.queue import Action, InOrder, Requests, Result, Shared
from primeslurm.tinker.requests import RequestError


class Tens:
    """Executes numbers together that add up to at most ten."""

    def __init__(self) -> None:
        self.executed: list[list[int]] = []

    def fits(self, works: Sequence[int]) -> bool:
        return sum(works) <= 10

    def cost(self, work: int) -> float:
        return work

    def execute(self, works: Sequence[int]) -> list[Action]:
        if 99 in works:
            raise ValueError("broken")
        self.executed.append([*works])
        return [partial(dict, number=work) for work in works]


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_requests_run_in_order_however_they_arrive(worker: ThreadPoolExecutor) -> None:
    for arrival in permutations([1, 2, 3, 4]):
        requests, order, executed = Requests(worker, Tens()), InOrder(), list[int]()

        def action(number: int, executed: list[int] = executed) -> Result:
            executed.append(number)
            return {"number": number}

        for number in [*arrival, *arrival]:  # each is sent twice
            requests.submit(f"run:{number}", partial(action, number), number, order)
        assert [requests.future(f"run:{number}").result(600) for number in arrival] == [{"number": n} for n in arrival]
        assert executed == [1, 2, 3, 4]


def test_failures_are_results(worker: ThreadPoolExecutor) -> None:
    requests = Requests(worker, Tens())

    def fail(error: Exception) -> Result:
        raise error

    requests.submit("user", partial(fail, RequestError("rank", 9, "is too large")))
    requests.submit("server", partial(fail, ValueError("broken")))
    assert requests.future("user").result(600) == {"error": "rank = 9: is too large", "category": "user"}
    requests.submit("shared", Shared(99))
    for name in ("server", "shared"):
        assert requests.future(name).result(600) == {"error": "ValueError: broken", "category": "server"}


def test_old_results_are_forgotten(worker: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "RETRIEVED", 1)
    requests, order = Requests(worker, Tens()), InOrder()
    for number in (1, 2):
        requests.submit(f"run:{number}", dict, number, order)
        requests.future(f"run:{number}").result(600)
        requests.retrieved(f"run:{number}")
        requests.retrieved(f"run:{number}")
    with pytest.raises(RequestError, match="run:1: is unknown"):
        requests.future("run:1")
    with pytest.raises(RequestError, match="seq_id = 1: is in the past; the next one is 3"):
        requests.submit("run:1", dict, 1, order)
    requests.forget("run")
    with pytest.raises(RequestError, match="its session ended"):
        requests.future("run:2")


def test_result_that_is_retrieved_twice_counts_once(
    worker: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "RETRIEVED", 2)
    requests = Requests(worker, Tens())
    for name in ("a:1", "b:1", "b:1"):
        requests.submit(name, dict)
        requests.future(name).result(600)
        requests.retrieved(name)
    assert requests.future("a:1").done()


def test_queued_work_of_a_forgotten_session_never_runs(worker: ThreadPoolExecutor) -> None:
    requests, go, executed = Requests(worker, Tens()), Event(), list[str]()

    def action(name: str) -> Result:
        assert go.wait(600)
        executed.append(name)
        return {}

    for name in ("a:1", "b:1", "b:2", "a:2"):
        requests.submit(name, partial(action, name))
    last, cancelled = requests.future("a:2"), requests.future("b:2")
    requests.forget("b")
    with pytest.raises(CancelledError):
        cancelled.result(600)
    go.set()
    assert last.result(600) == {} and executed == ["a:1", "a:2"]


def test_results_that_no_client_retrieves_are_bounded(
    worker: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "PER_SESSION", 2)
    requests = Requests(worker, Tens())
    for name in ("a:1", "b:1", "a:2", "a:3"):
        requests.submit(name, dict)
        requests.future(name).result(600)
    with pytest.raises(RequestError, match="a:1: is unknown"):
        requests.future("a:1")
    assert all(requests.future(name).done() for name in ("b:1", "a:2", "a:3"))


def test_users_share_the_service_by_cost(worker: ThreadPoolExecutor) -> None:
    """A client that samples many long texts waits for the passes of another."""
    requests, go, executed = Requests(worker, Tens()), Event(), list[str]()

    def sample() -> Result:
        executed.append("sample")
        return {}

    def update() -> Result:
        executed.append("update")
        return {}

    worker.submit(go.wait, 600)
    for number in range(2):
        requests.submit(f"a:{number}", sample, cost=50_000)
        requests.submit(f"b:{number}", update)
    go.set()
    for name in ("a:0", "a:1", "b:0", "b:1"):
        requests.future(name).result(600)
    assert executed == ["sample", "update", "update", "sample"]


def test_clients_take_turns_and_share_work_that_fits(worker: ThreadPoolExecutor) -> None:
    tens, go, alone = Tens(), Event(), list[str]()
    requests = Requests(worker, tens)

    def update(client: str) -> Result:
        alone.append(client)
        tens.executed.append([])
        return {}

    worker.submit(go.wait, 10)
    # Client a has the most requests, and sent all of them first. Nothing fits beside 60.
    sent: dict[str, list[int | None]] = {"a": [4, 4, None, 4, 1], "b": [3, None, 60], "c": [7, 2, 2], "d": [3]}
    for client, works in sent.items():
        for number, work in enumerate(works):
            requests.submit(f"{client}:{number}", partial(update, client) if work is None else Shared(work))
    go.set()
    for client, works in sent.items():
        for number, work in enumerate(works):
            expected = {} if work is None else {"number": work}
            assert requests.future(f"{client}:{number}").result(600) == expected
    assert tens.executed == [[4, 3, 3], [7], [], [4, 2], [], [2, 4], [60], [1]]
    assert alone == ["b", "a"]
