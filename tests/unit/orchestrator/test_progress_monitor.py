"""Progress, stalls and metrics of a run, and the bookkeeping of workers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from primeslurm.orchestrator.rollouts.job_protocol import (
    Cancel,
    Describe,
    Job,
    JobDescriptions,
    JobFailure,
    Result,
    SendResults,
    Status,
    ToWorker,
)
from primeslurm.orchestrator.rollouts.job_runner import give_notice
from primeslurm.orchestrator.rollouts.worker_pool import DELIVERY_TIMEOUT_S, GIVE_UP_S
from primeslurm.orchestrator.telemetry.batch_metrics import batch_metrics
from primeslurm.orchestrator.telemetry.progress_monitor import ProgressMonitor, StallError
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.inference import EngineParallel, Inference
from primeslurm.records.journal import Journal
from primeslurm.records.state import OrchestratorState
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.transport import curve
from tests.support.clock import Clock
from tests.support.waiting import wait_until_async
from tests.support.worker_pools import CallbackPool
from tests.unit.orchestrator.test_packing import group

RECIPE = Recipe.model_validate(
    {
        "name": "test",
        "max_steps": 5,
        "seq_len": 64,
        "model": {"path": "/m"},
        "environments": [{"id": "reverse-text"}],
        "orchestrator": {"stall_timeout_s": 100},
    }
)


def test_batch_metrics() -> None:
    row = batch_metrics([group([3, 70], [1.0, 0.0]), group([3, 3], [0.5, 0.5])], step=4, seq_len=64)
    assert row["reward/mean"] == 0.5 and row["groups/zero_signal"] == 0.5
    assert row["staleness/mean"] == row["staleness/max"] == 3.0
    assert row["rollouts/longer_than_seq_len"] == 0.25 and row["e/reward"] == 0.5
    assert "router_replay/repeated" not in row


def test_fractions_of_repeated_and_unknown_experts_are_metrics() -> None:
    whole = group([3, 7], [1.0, 0.0])
    first, second = whole.rollouts
    info = msgspec.structs.replace(first[0].info, repeated_experts=2, unknown_experts=3)
    some = replace(whole, rollouts=((replace(first[0], info=info),), second))
    row = batch_metrics([some], step=4, seq_len=64)
    assert row["router_replay/repeated"] == 0.2 and row["router_replay/unknown"] == 0.3


def check(watch: ProgressMonitor, suspect: str = "nobody") -> None:
    watch.check_stall(lambda: suspect, lambda job: False, ())


def test_stall_ends_the_attempt_and_names_the_suspect(tmp_path: Path) -> None:
    clock = Clock()
    watch = ProgressMonitor(RECIPE, Journal(tmp_path, "orchestrator"), dict, clock)
    clock.now = 1000.0
    check(watch)  # nothing has begun
    watch.policy_wanted(0)
    clock.now += 2
    watch.policy_current(0)
    clock.now += 99
    check(watch)
    clock.now += 2
    with pytest.raises(StallError, match="the culprit") as caught:
        check(watch, "the culprit")
    assert caught.value.exit_code == 76
    events = [json.loads(line) for line in (tmp_path / "events/orchestrator.jsonl").read_text().splitlines()]
    assert events[-1]["kind"] == "stall" and events[-1]["suspect"] == "the culprit"


def test_row_has_the_load_of_each_role(tmp_path: Path) -> None:
    watch = ProgressMonitor(RECIPE, Journal(tmp_path, "orchestrator"), dict, Clock())
    for running in (8.0, 0.0, 8.0, 8.0):
        watch.engines_seen({"decode-r0-0": {"running": running, "waiting": 0.0, "kv_usage": 0.1}})
    row = watch.step_metrics(Counter(), {"inflight": 7}, version=3)
    assert row["engines/decode/busy_mean"] == 0.75 and row["policy/version"] == 3 and row["queue/inflight"] == 7


def test_row_has_gpu_hours_and_idle_time_of_each_role(tmp_path: Path) -> None:
    recipe = RECIPE.model_copy(update={"inference": Inference(parallel=EngineParallel(tp=4))})
    engines = dict.fromkeys(("prefill-r0-0", "decode-r0-0", "decode-r0-1", "router-0"), "http://x")
    clock = Clock()
    watch = ProgressMonitor(recipe, Journal(tmp_path, "orchestrator"), lambda: engines, clock)
    for generated in (0.0, 800.0):
        clock.now += 10
        watch.engines_seen({f"decode-r0-{i}": {"running": generated / 100, "generated": generated} for i in (0, 1)})
    clock.now += 340
    row = watch.step_metrics(Counter(), {}, version=0)
    # Engines that do not answer cost as much as others.
    assert row["engines/prefill/gpu_hours"] == pytest.approx(4 * 360 / 3600)
    assert row["engines/decode/gpu_hours"] == pytest.approx(8 * 360 / 3600)
    assert row["engines/decode/idle_fraction"] == 0.5
    assert row["engines/decode/generated_per_s_per_gpu"] == pytest.approx(2 * 80 / 8)
    clock.now += 36
    assert watch.step_metrics(Counter(), {}, version=0)["engines/prefill/gpu_hours"] == pytest.approx(4 * 36 / 3600)


def test_state_shows_progress_of_engines(tmp_path: Path) -> None:
    clock, journal = Clock(), Journal(tmp_path, "orchestrator")
    watch = ProgressMonitor(RECIPE, journal, dict, clock)
    markers = []
    for tokens in (0.0, 100.0, 100.0):
        clock.now += 5.0
        watch.engines_seen({"decode-r0-0": {"generated": tokens}})
        watch.write_state(OrchestratorState(version=0))
        state = msgspec.json.decode((tmp_path / "state/orchestrator.json").read_bytes(), type=OrchestratorState)
        markers.append(state.marker)
    assert markers[0] != markers[1] == markers[2]


def test_run_does_not_stall_while_engines_compute(tmp_path: Path) -> None:
    clock = Clock()
    watch = ProgressMonitor(RECIPE, Journal(tmp_path, "orchestrator"), dict, clock)
    watch.policy_current(0)
    tokens = 0.0
    for _ in range(2 * 720):  # two hours
        clock.now += 5.0
        tokens += 100.0
        if clock.now == 3600.0:
            tokens = 50.0  # an engine was restarted, and counts anew
        watch.engines_seen({"decode-r0-0": {"generated": tokens, "running": 8.0}, "decode-r0-1": {"generated": 7.0}})
        check(watch)
    watch.engines_seen({"prefill-r0-0": {"prompted": 10.0}})
    for prompted in (500.0, 900.0):  # a long prompt, of which nothing is generated yet
        clock.now += 60.0
        watch.engines_seen({"prefill-r0-0": {"prompted": prompted}})
        check(watch)
    stuck = {"decode-r0-0": {"generated": tokens, "running": 8.0, "waiting": 2.0}}
    for _ in range(21):
        watch.engines_seen(stuck)
        clock.now += 5.0
    with pytest.raises(StallError, match=r"no token was generated.*8 running and 2 waiting requests; suspect: them"):
        check(watch, "them")
    watch.engines_seen({"decode-r0-0": {"generated": tokens}})
    with pytest.raises(StallError, match="engines have no requests"):
        check(watch)


def test_attempt_ends_if_all_rollouts_fail(tmp_path: Path) -> None:
    watch = ProgressMonitor(RECIPE, Journal(tmp_path, "orchestrator"), dict, Clock())
    for _ in range(4 * RECIPE.orchestrator.batch_size - 1):
        watch.rollout_failed("j", JobFailure("ZeroDivisionError"))
    check(watch)
    watch.rollout_failed("j", JobFailure("ZeroDivisionError"))
    with pytest.raises(StallError, match="ZeroDivisionError"):
        check(watch)


def test_attempt_ends_if_all_groups_are_rejected(tmp_path: Path) -> None:
    clock = Clock()
    watch = ProgressMonitor(RECIPE, Journal(tmp_path, "orchestrator"), dict, clock)
    groups = 4 * RECIPE.orchestrator.batch_size // RECIPE.orchestrator.group_size
    for i in range(3 * groups):  # rollouts finish all the time
        clock.now += 1
        watch.policy_current(i)
        watch.group_rejected("zero_advantage" if i % 2 else "length", RECIPE.orchestrator.group_size)
        if i == groups:
            watch.group_kept()
        if clock.now < groups + 1 + RECIPE.orchestrator.stall_timeout_s:
            check(watch)
    with pytest.raises(StallError, match=r"length: \d+.*none was kept for 100 s: no batch can form"):
        check(watch)
    events = [json.loads(line) for line in (tmp_path / "events/orchestrator.jsonl").read_text().splitlines()]
    assert events[-1]["kind"] == "stall" and events[-1]["suspect"] == "algorithm"


class Peers:
    """Workers with its callbacks recorded, and real sockets on the other side."""

    def __init__(self, address: str) -> None:
        self.clock = Clock()
        self.results: list[tuple[str, object]] = []
        self.lost: list[str] = []
        self.unusable: list[tuple[str, int, str]] = []
        self.address = address
        self.kept: set[str] = set()
        self.claims: list[Job] = []
        told = (self._result, self.lost.append, self._unusable)
        asked = {"claim": self._claim, "keeps": self.kept.__contains__}
        self.workers = CallbackPool(address, *told, clock=self.clock, **asked)

    def _claim(self, job: Job, runs: bool) -> bool:
        self.claims.append(job)
        return job.sender == "killed"

    def _result(self, job: str, outcome: tuple[Rollout, ...] | str) -> None:
        self.results.append((job, outcome))

    def _unusable(self, environment: str, worker: int, error: str) -> None:
        self.unusable.append((environment, worker, error))

    def connect(self) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        curve.secure_client(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.address)
        return socket

    async def tell(
        self, socket: zmq.asyncio.Socket, message: Status | Result | JobDescriptions, *frames: bytes
    ) -> None:
        await socket.send_multipart([msgspec.msgpack.encode(message), *frames])
        identity, head, *rest = await self.workers._socket.recv_multipart()
        await self.workers._receive(identity, head, rest)


async def heard(socket: zmq.asyncio.Socket) -> ToWorker:
    message: ToWorker = msgspec.msgpack.decode(await socket.recv(), type=ToWorker)
    return msgspec.structs.replace(message, number=0) if isinstance(message, Job) else message


@pytest.fixture
def peers(tmp_path: Path) -> Peers:
    return Peers(f"ipc://{tmp_path}/envs")


def job(name: str) -> Job:
    return Job(name, "g", "e", 0, 0, "http://r", "salt")


async def test_worker_that_cannot_start_reports_why(peers: Peers) -> None:
    serving = asyncio.create_task(peers.workers.serve())
    await asyncio.to_thread(give_notice, "e", 3, peers.address, ImportError("no index \ud83d"))
    await wait_until_async(lambda: peers.unusable)
    serving.cancel()
    assert peers.unusable == [("e", 3, "ImportError: no index \\ud83d")] and not peers.workers.environments


async def test_missing_jobs_are_lost_and_unknown_jobs_are_cancelled(peers: Peers) -> None:
    socket = peers.connect()
    await peers.tell(socket, Status("e", 0, "x", ["old"]))
    assert await heard(socket) == Describe(["old"])
    await peers.tell(socket, JobDescriptions([job("old")]))
    assert await heard(socket) == Cancel(["old"]) and peers.claims == [job("old")]
    await peers.workers.send(job("a"))
    await peers.tell(socket, Status("e", 0, "x", []))
    assert peers.lost == [], "the status may have been written before the job arrived"
    peers.clock.now += DELIVERY_TIMEOUT_S + 1
    await peers.tell(socket, Status("e", 0, "x", []))
    assert peers.lost == ["a"]


@pytest.mark.parametrize("end", ["restart", "silence"])
async def test_jobs_of_a_lost_worker_are_lost(peers: Peers, end: str) -> None:
    socket = peers.connect()
    await peers.tell(socket, Status("e", 0, "x", []))
    await peers.workers.send(job("a"))
    if end == "restart":
        await peers.tell(peers.connect(), Status("e", 0, "y", []))
    else:
        for _ in range(int(GIVE_UP_S) + 1):
            assert peers.lost == []
            peers.clock.now += 1.0
            peers.workers.expire()
    assert peers.lost == ["a"]
    await peers.tell(socket, Result("a", error="late"))
    assert peers.results == [], "a late result of a lost job counts for nothing"


async def test_worker_keeps_its_jobs_after_a_reconnect(peers: Peers) -> None:
    socket = peers.connect()
    await peers.tell(socket, Status("e", 0, "x", []))
    await peers.workers.send(job("a"))
    assert await heard(socket) == job("a")
    socket.disconnect(peers.address)
    socket.connect(peers.address)
    await peers.tell(socket, Status("e", 0, "x", ["a"]))
    await peers.workers.send(job("b"))
    assert await heard(socket) == job("b"), "nothing was cancelled"
    await peers.tell(socket, Result("a", error="e"))
    assert peers.results == [("a", JobFailure("e"))] and peers.lost == []


async def test_jobs_of_a_killed_orchestrator_are_adopted_once(peers: Peers) -> None:
    socket = peers.connect()
    runs, ended = (msgspec.structs.replace(job(name), sender="killed", number=7) for name in ("runs", "ended"))
    status = Status("e", 0, "x", ["runs"], held={"ended": 9}, seen=7)
    await peers.tell(socket, Result("ended"), b"from before the restart")
    await peers.tell(socket, status)
    assert await heard(socket) == Describe(["ended", "runs"]) and peers.results == []
    assert peers.workers.count_settled({"e"}) == 0
    await peers.tell(socket, JobDescriptions([runs, ended]))
    await peers.tell(socket, JobDescriptions([runs, ended]))
    assert [claimed.id for claimed in peers.claims] == ["runs", "ended"], "a second answer claims nothing"
    assert peers.workers.load == {"": 2}
    await peers.tell(socket, status)
    assert await heard(socket) == SendResults(["ended"]) and peers.workers.count_settled({"e"}) == 1
    await peers.tell(socket, status)  # written before the worker was asked: it is not asked twice
    await peers.tell(socket, Result("ended", error="e"))
    assert peers.results == [("ended", JobFailure("e"))]
    peers.kept.add("ended")
    await peers.tell(socket, status)
    await peers.tell(socket, Result("runs", error="e"))
    await peers.tell(socket, Status("e", 0, "x", [], held={"ended": 9}, seen=7))
    assert peers.workers.load == {"": 0} and peers.lost == []
    peers.kept.clear()  # its group is on disk
    await peers.tell(socket, Status("e", 0, "x", [], held={"ended": 9}, seen=7))
    assert await heard(socket) == Describe(["ended"])


async def test_adopted_job_that_its_worker_no_longer_has_is_lost(peers: Peers) -> None:
    socket = peers.connect()
    await peers.tell(socket, Status("e", 0, "x", ["a"], seen=7))
    await peers.tell(socket, JobDescriptions([msgspec.structs.replace(job("a"), sender="killed", number=7)]))
    await peers.tell(socket, Status("e", 0, "x", [], seen=7))
    assert peers.lost == ["a"]
