"""An engine that gives damaged answers is found and restarted, and its requests are retried."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from primeslurm.inference.version_gate import GateState
from primeslurm.orchestrator.rollouts.job_protocol import AnswerCounts
from primeslurm.orchestrator.weight_updates.damaged_answers import (
    FEW,
    MANY,
    SETTLE_S,
    WINDOW_S,
    BadEngine,
    DamagedAnswers,
)
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.weight_updates.weight_update_loop import MISSED_UPDATES, WeightUpdateLoop
from primeslurm.orchestrator.worker.generate_endpoint import AnswerTally, GenerateEndpoint, NoAnswerError, completion_of
from primeslurm.records.journal import Journal
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.weight_transfer.messages import EngineStatus
from tests.support.clock import Clock
from tests.support.waiting import wait_until_async


def answer(tokens: int = 3, **changes: Any) -> dict[str, Any]:
    """What an engine says."""
    choice = {
        "token_ids": list(range(tokens)),
        "logprobs": {"content": [{"logprob": -0.5}] * tokens},
        "weight_versions": [{"version": "1", "start": 0, "end": tokens}],
        "finish_reason": "stop",
    }
    return {"choices": [{**choice, **changes}]}


def logprobs(*values: float) -> dict[str, Any]:
    return answer(len(values), logprobs={"content": [{"logprob": value} for value in values]})


NONSENSE = {
    "an error's body": {"error": {"message": "CUDA error", "code": 500}},
    "no choice": {"choices": []},
    "NaN": logprobs(-0.5, math.nan),
    "infinite": logprobs(-0.5, -math.inf),
    "a probability above 1": logprobs(-0.5, 3.0),
    "no evidence at all": logprobs(-9999.0, -9999.0),
    "nothing sampled": answer(0),
    "fewer log-probabilities": answer(logprobs={"content": [{"logprob": -0.5}]}),
    "fewer versions": answer(weight_versions=[{"version": "1", "start": 0, "end": 1}]),
    "versions in another order": answer(
        weight_versions=[{"version": "2", "start": 1, "end": 3}, {"version": "1", "start": 0, "end": 1}]
    ),
    "versions of the same tokens": answer(
        weight_versions=[{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 1, "end": 2}]
    ),
    "versions of tokens that are not there": answer(weight_versions=[{"version": "1", "start": 0, "end": 2**31 - 1}]),
    "a gap between versions": answer(
        weight_versions=[{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 5, "end": 7}]
    ),
    "negative tokens": answer(token_ids=[1, -2, 3]),
    "aborted": answer(finish_reason="abort"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_damaged_answers_are_recognised(name: str) -> None:
    with pytest.raises(DamagedError):
        completion_of(json.dumps(NONSENSE[name]).encode(), 5, None)


def test_single_token_without_log_probability_is_accepted() -> None:
    found = completion_of(json.dumps(logprobs(-0.5, -9999.0)).encode(), 5, None)
    assert found.logprobs[1] != -9999.0 and found.logprobs[1] == pytest.approx(-9999.0)


def test_empty_first_span_names_the_version_of_the_prefill_engine() -> None:
    spans = [{"version": "1", "start": 0, "end": 0}, {"version": "2", "start": 0, "end": 3}]
    found = completion_of(json.dumps(answer(weight_versions=spans)).encode(), 5, None)
    assert (found.prefill_version, found.versions) == (1, [2, 2, 2])
    assert completion_of(json.dumps(answer()).encode(), 5, None).prefill_version is None


class Server:
    """An engine's HTTP server that says one thing after another, and names itself as a gate does."""

    def __init__(self, *says: Any, status: int = 200) -> None:
        self.says, self.status, self.asked = list(says), status, 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = re.findall(rb"content-length: ([0-9]+)", head.lower())
        await reader.readexactly(int(length))
        said = json.dumps(self.says[min(self.asked, len(self.says) - 1)]).encode()
        status = self.status if self.asked < len(self.says) - 1 or len(self.says) == 1 else 200
        self.asked += 1
        named = b"X-Primeslurm-Engine: 10.0.0.7:8000\r\n"
        writer.write(b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n" % (status, named, len(said)) + said)
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


BODY = {"token_ids": [1] * 5, "sampling_params": {}}


@pytest.mark.parametrize("status", [200, 500])
async def test_damaged_answer_is_retried_and_counted_for_its_engine(status: int) -> None:
    tally = AnswerTally()
    tally.begin("session", "math-00000007")
    async with Server(NONSENSE["an error's body"], answer(), status=status).serving() as url:
        endpoint = GenerateEndpoint(lambda: url, 64, 60, tally=tally)
        assert (await endpoint.generate(BODY, {"X-Session-ID": "session"})).token_ids == [0, 1, 2]
        await endpoint.close()
    ((engine, counted),) = tally.take().items()
    assert engine == "10.0.0.7:8000" and (counted.good, counted.damaged) == (1, 1)
    assert counted.tasks == ["math-00000007"] and counted.error
    assert tally.take() == {}


@pytest.mark.parametrize(
    "damaged", [answer(4), answer(token_ids=[0, 1, 100])], ids=["more tokens than asked for", "no token of the model"]
)
async def test_impossible_tokens_count_for_the_engine(damaged: dict[str, Any]) -> None:
    tally, body = AnswerTally(), {**BODY, "sampling_params": {"max_tokens": 3}}
    async with Server(damaged, answer()).serving() as url:
        endpoint = GenerateEndpoint(lambda: url, 64, 60, tally=tally, vocab=100)
        assert (await endpoint.generate(body, {})).token_ids == [0, 1, 2]
        await endpoint.close()
    assert (tally.take()["10.0.0.7:8000"].damaged, tally.take()) == (1, {})


@pytest.mark.parametrize("status", [408, 425, 429])
async def test_busy_router_is_retried(status: int) -> None:
    tally = AnswerTally()
    async with Server({"error": "too many requests"}, answer(), status=status).serving() as url:
        endpoint = GenerateEndpoint(lambda: url, 64, 60, tally=tally)
        assert (await endpoint.generate(BODY, {})).token_ids == [0, 1, 2]
        await endpoint.close()
    assert tally.take()["10.0.0.7:8000"].damaged == 0


async def test_permanently_damaged_answers_raise_no_answer_error() -> None:
    async with Server(NONSENSE["NaN"]).serving() as url:
        endpoint = GenerateEndpoint(lambda: url, 64, 5)
        with pytest.raises(NoAnswerError, match=r"10\.0\.0\.7:8000 gave a damaged answer"):
            await endpoint.generate(BODY, {})
        await endpoint.close()


@pytest.mark.parametrize("fault", ["a router that reads nothing", "a damaged chunk after the first"])
async def test_request_without_complete_answer_ends(fault: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if fault == "a damaged chunk after the first":
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
            await asyncio.sleep(0.1)  # aiohttp notices damage that comes with the headers
            writer.write(b"ZZZ\r\n")
        await asyncio.sleep(60)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    endpoint = GenerateEndpoint(lambda: url, 64, 0.6)
    # Larger than the sockets' buffers, so a router that reads nothing stops the sending.
    body = BODY | ({"filling": "x" * (32 << 20)} if fault == "a router that reads nothing" else {})
    with pytest.raises(NoAnswerError, match=r"TimeoutError: no complete answer .*0\.6"):
        await endpoint.generate(body, {})
    await endpoint.close()
    server.close()


def bad(count: int = 1, *tasks: int) -> AnswerCounts:
    return AnswerCounts(0, count, [f"t{task}" for task in tasks], "NaN")


def good(count: int = 1) -> AnswerCounts:
    return AnswerCounts(count)


ENGINES = ["decode-r0-0", "decode-r0-1", "prefill-r0-0"]
A, B = ENGINES[:2]


class Judge:
    """Hears of engines, a minute after the verdict before."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.answers = DamagedAnswers(self.clock)

    def hear(self, **reports: AnswerCounts) -> list[BadEngine]:
        names = {"a": A, "b": B}
        return self.answers.add({names[name]: each for name, each in reports.items()}, ENGINES)

    def later(self) -> None:
        self.clock.now += SETTLE_S + 1


@pytest.fixture
def judge() -> Judge:
    return Judge()


def test_bad_engine_is_found_before_others_answer(judge: Judge) -> None:
    assert judge.hear(a=bad(FEW - 1, 1, 2)) == []
    assert judge.hear(a=bad(1, 3)) == [BadEngine(A, FEW, FEW, "NaN", again=False)]


def test_few_damaged_answers_among_many_are_tolerated(judge: Judge) -> None:
    for task in range(100):
        assert judge.hear(a=AnswerCounts(3, 1, [f"t{task}"], "x")) == []


def test_engine_can_become_bad_after_a_long_time(judge: Judge) -> None:
    judge.hear(a=good(1_000_000))
    judge.clock.now += WINDOW_S + 1
    assert [each.engine for each in judge.hear(a=bad(FEW, 1, 2, 3))] == [A]


def test_task_that_breaks_all_engines_restarts_none(judge: Judge) -> None:
    for _ in range(100):
        assert judge.hear(a=bad(1, 7)) == [] == judge.hear(b=bad(1, 7))


def test_many_damaged_answers_to_one_task_suffice_if_others_work(judge: Judge) -> None:
    assert judge.hear(b=good()) == []
    assert [each.engine for each in judge.hear(a=bad(MANY, 7))] == [A]


def test_reports_from_before_a_restart_are_ignored(judge: Judge) -> None:
    assert judge.hear(a=bad(FEW, 1, 2, 3))
    assert judge.hear(a=bad(FEW, 4, 5, 6)) == [], "another worker's report of the same second"
    judge.later()
    assert judge.hear(a=bad(FEW - 1, 4, 5, 6)) == []
    assert judge.hear(a=bad(1, 4, 5, 6)) != []


def test_bad_engines_after_restarts_of_all_end_the_run(judge: Judge) -> None:
    assert [each.again for each in judge.hear(a=bad(FEW, 1, 2, 3), b=bad(FEW, 1, 2, 3))] == [False, False]
    judge.later()
    assert [each.again for each in judge.hear(b=bad(FEW, 4, 5, 6))] == [True]


def test_permanently_broken_engine_is_restarted_each_time(judge: Judge) -> None:
    for working in (True, False):
        for _ in range(5):
            assert [each.again for each in judge.hear(a=bad(FEW, 1, 2, 3))] == [False]
            if working:
                judge.hear(b=good())
            judge.later()


class Engine:
    """An engine's HTTP server with the real gate's state."""

    def __init__(self) -> None:
        self.gate = GateState()
        self.gate.version = 0
        self.unanswered = 0
        """Control requests that fail with `error`."""
        self.error: type[httpx.TransportError] = httpx.ConnectTimeout
        self.ended = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/primeslurm/status":
            report: EngineStatus = self.gate.report()
            return httpx.Response(200, json={key: getattr(report, key) for key in report.__struct_fields__})
        if path == "/primeslurm/shutdown":
            self.ended += 1
            self.gate = GateState()  # a new process
            return httpx.Response(200)
        if self.unanswered:
            self.unanswered -= 1
            raise self.error("busy", request=request)
        self.gate.observe(path, request.content, True)
        return httpx.Response(200)


class Loop:
    """A weight update loop over two engines."""

    def __init__(self, directory: Path) -> None:
        self.engines = {"a": Engine(), "b": Engine()}
        self.announced: list[tuple[int, list[int | None]]] = []
        clients = {}
        for name, engine in self.engines.items():
            clients[name] = EngineClient(lambda name=name: f"http://{name}:1", "/m")  # type: ignore[misc]
            transport = httpx.AsyncClient(transport=httpx.MockTransport(engine))
            clients[name]._http = clients[name]._polling = transport
        urls = {name: f"http://{name}:1" for name in clients}
        self.journal = Journal(directory / "attempts" / "1", "o")
        self.loop = WeightUpdateLoop(clients, self.journal, 60, poll_s=0.01, after_update=self._after, urls=urls)
        self.path = directory / "attempts" / "1" / "events" / "o.jsonl"

    async def _after(self, version: int) -> None:
        self.announced.append((version, [engine.gate.version for engine in self.engines.values()]))

    async def begin(self) -> None:
        """Wait until both engines have the first policy."""
        await self.loop.want(PolicyVersion(0, ""))
        await wait_until_async(lambda: all(self.loop.pool.state(name) == "CURRENT" for name in self.engines))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [each for line in self.path.read_text().splitlines() if (each := json.loads(line))["kind"] == kind]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[WeightUpdateLoop]:
        task = asyncio.create_task(self.loop.run())
        try:
            yield self.loop
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


ERRORS = [httpx.ConnectTimeout, httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("missed", [1, MISSED_UPDATES - 1])
async def test_version_is_announced_only_after_an_unresponsive_engine_has_it(
    tmp_path: Path, missed: int, error: type[httpx.TransportError]
) -> None:
    made = Loop(tmp_path)
    made.engines["b"].error = error
    async with made.running() as loop:
        await made.begin()
        made.engines["b"].unanswered = missed
        await loop.want(PolicyVersion(1, "/p/1"))
        await loop.wait_for(1, 600)
    assert made.announced == [(0, [0, 0]), (1, [1, 1])]
    assert not made.engines["b"].ended


@pytest.mark.parametrize("error", ERRORS)
async def test_engine_that_answers_polls_but_no_updates_is_restarted(
    tmp_path: Path, error: type[httpx.TransportError]
) -> None:
    made = Loop(tmp_path)
    made.engines["b"].error = error
    async with made.running() as loop:
        await made.begin()
        made.engines["b"].unanswered = MISSED_UPDATES
        await loop.want(PolicyVersion(1, "/p/1"))
        await wait_until_async(lambda: loop.pool.report()["b"].version == 1)
    assert made.engines["b"].ended == 1 and loop.current_version == 1
    assert made.announced[-1][0] == 1 and made.announced[-1][1][1] != 0, "it served nothing then, or the new policy"


async def test_engine_with_damaged_answers_is_restarted(tmp_path: Path) -> None:
    made = Loop(tmp_path)
    async with made.running() as loop:
        await made.begin()
        await loop.want(PolicyVersion(1, "/p/1"))
        await loop.wait_for(1, 600)
        loop.take_answers({"b:1": bad(FEW, 1, 2, 3), "a:1": good()})
        await wait_until_async(lambda: made.engines["b"].ended and made.engines["b"].gate.version == 1)
        assert loop.useless == ""
    assert (made.engines["a"].ended, made.engines["b"].ended) == (0, 1)
    (event,) = made.events("engine_answers_damaged")
    assert (event["engine"], event["damaged"], event["error"]) == ("b", FEW, "NaN")


async def test_run_ends_if_all_engines_are_bad_after_a_restart(tmp_path: Path) -> None:
    made = Loop(tmp_path)
    async with made.running() as loop:
        await made.begin()
        clock = loop._damaged._clock = Clock()  # type: ignore[assignment]
        for _ in range(2):
            assert loop.useless == ""
            clock.now += SETTLE_S + 1
            loop.take_answers({"a:1": bad(FEW, 1, 2, 3), "b:1": bad(FEW, 1, 2, 3)})
    assert loop.useless.startswith("engines give no usable answers, also after a restart: ")
    assert "NaN" in loop.useless


async def test_unknown_engine_behind_a_router_is_reported(tmp_path: Path) -> None:
    made = Loop(tmp_path)
    made.loop.take_answers({"10.0.0.9:80": bad(FEW, 1, 2, 3)})
    (event,) = made.events("engine_answers_damaged")
    assert event["engine"] == "an engine behind 10.0.0.9:80" and not made.loop.useless
