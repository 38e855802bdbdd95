"""The orchestrator's sockets. An invalid message gets an error response, and does not affect other senders."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.ports import free_port
from primeslurm.orchestrator.rollouts import job_protocol
from primeslurm.orchestrator.rollouts.flow_control import CHUNK_BYTES, MAX_FRAME_BYTES, join_frames, to_chunks
from primeslurm.orchestrator.rollouts.job_protocol import Job, Result, Status
from primeslurm.orchestrator.rollouts.job_runner import JobRunner
from primeslurm.wire.batches.batch import RankShard
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.link import trainer_link
from primeslurm.wire.link.messages import LARGEST_REQUEST, Answer, GetBatch, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.link.trainer_link import TrainerLink
from primeslurm.wire.transport import curve
from tests.support.port_messages import ASKED, MESSAGES
from tests.support.worker_pools import CallbackPool
from tests.unit.fuzz.mutations import fuzzed, messages, trees
from tests.unit.fuzz.test_messages import RESULT, WORDS, batch, rollout

T = TypeVar("T")
WAIT_MS = 60_000
REQUEST = [b"", msgspec.msgpack.encode(WORDS[0])]
FRAMES = msgspec.msgpack.decode(RESULT[0], type=Result).frames


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


class Served:
    """A link and a pool of workers, in their own thread until `stop`."""

    def __init__(self) -> None:
        self.link, self.pool = free_address(), free_address()
        self.results: list[tuple[str, tuple[Rollout, ...] | str]] = []
        self.unusable: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        served = OrchestratorLink(self.link, self._handle)
        pool = CallbackPool(
            self.pool, lambda job, found: self.results.append((job, found)), lambda job: None, self._unusable
        )
        self._pool = pool
        tasks = [asyncio.create_task(served.serve()), asyncio.create_task(pool.serve())]
        self._ready.set()
        await asyncio.wait([*tasks, asyncio.create_task(self._stopped.wait())], return_when="FIRST_COMPLETED")
        self.alive = not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _handle(self, request: Request) -> Sequence[Frame] | Answer:
        return batch().encode() if isinstance(request, GetBatch) else Answer("ok")

    def _unusable(self, environment: str, worker: int, error: str) -> None:
        self.unusable.append(error)

    def send(self, job: Job) -> None:
        asyncio.run_coroutine_threadsafe(self._pool.send(job), self._loop).result(60)

    def available(self) -> set[str]:
        async def look() -> set[str]:
            return self._pool.available

        return asyncio.run_coroutine_threadsafe(look(), self._loop).result(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.stop()
    assert found.alive, "the orchestrator's sockets were served to the end"


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    found: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    try:
        curve.secure_client(found)
        found.setsockopt(zmq.LINGER, 0)
        found.connect(address)
        yield found
    finally:
        found.close()


def answers(peer: zmq.Socket[bytes]) -> Iterator[Answer]:
    while True:
        assert peer.poll(WAIT_MS), "no answer"
        yield msgspec.msgpack.decode(peer.recv_multipart()[1], type=Answer)


def is_served(served: Served) -> None:
    """Check that both sockets answer valid requests."""
    with dealer(served.link) as peer:
        peer.send_multipart([b"", msgspec.msgpack.encode(WORDS[3])])
        assert next(answers(peer)).kind == "ok"
    with dealer(served.pool) as peer:
        number = len(served.results)
        peer.send(msgspec.msgpack.encode(Status("good", number, "1", [])))
        give(served, job := f"good-{number}")
        peer.send_multipart([msgspec.msgpack.encode(Result(job, FRAMES)), *RESULT[1:]])
        found = until(lambda: [outcome for name, outcome in served.results if name == job])
        assert len(found[0]) == 2 and isinstance(found[0][0], Rollout)


def give(served: Served, job: str) -> None:
    until(lambda: "good" in served.available())
    served.send(Job(job, "g", "good", 0, 0, "r", "s"))


def until(look: Callable[[], T]) -> T:
    deadline = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


@fuzzed(0.5)
@given(st.sampled_from(WORDS[:5]).flatmap(trees).map(msgspec.msgpack.encode) | st.binary(max_size=40))
def test_every_request_is_answered(served: Served, request_: bytes) -> None:
    with dealer(served.link) as peer:
        peer.send_multipart([b"", request_])
        assert next(answers(peer)).kind in {"ok", "batch", "error"}


@fuzzed(0.5)
@given(st.lists(messages(REQUEST), max_size=4))
def test_invalid_requests_are_ignored(served: Served, wrong: list[list[bytes]]) -> None:
    with dealer(served.link) as peer:
        for parts in wrong:
            if parts and max(map(len, parts)) <= LARGEST_REQUEST:  # longer ones would close the connection
                peer.send_multipart(parts)
        peer.send_multipart([b"", msgspec.msgpack.encode(WORDS[3])])
        assert next(answers(peer)).kind in {"ok", "batch", "error"}


MANY = [b"x"] * 50_000


def test_message_with_many_frames_is_ignored(served: Served) -> None:
    """The sender has the secret. Nobody else gets this far."""
    with dealer(served.link) as peer:
        peer.send_multipart([*REQUEST, *MANY])
        peer.send_multipart([*MANY, *REQUEST])
        peer.send_multipart([b"", msgspec.msgpack.encode(WORDS[3])])
        assert next(answers(peer)).kind in {"ok", "batch", "error"}
    with dealer(served.pool) as peer:
        for head in (STATUS, RESULT):
            peer.send_multipart([*head, *MANY])
        peer.send(msgspec.msgpack.encode(job_protocol.Unusable("e", 0, "after many parts")))
        until(lambda: "after many parts" in served.unusable)
    is_served(served)


STATUS = [msgspec.msgpack.encode(WORDS[5])]


@fuzzed(0.5)
@given(st.lists(messages(RESULT) | messages(STATUS) | trees(WORDS[5]).map(lambda each: [_packed(each)]), max_size=4))
def test_invalid_worker_messages_are_ignored(served: Served, wrong: list[list[bytes]]) -> None:
    with dealer(served.pool) as peer:
        for parts in wrong:
            if parts:  # longer ones would close the connection, and the next message with it
                peer.send_multipart(parts if max(map(len, parts)) <= MAX_FRAME_BYTES else to_chunks(parts))
        error = f"last of {len(served.unusable)}"
        peer.send(msgspec.msgpack.encode(job_protocol.Unusable("e", 0, error)))
        until(lambda: error in served.unusable)


def _packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize("kind", ["damaged", "missing", "of a token below 0"])
def test_bad_result_costs_only_its_rollout(served: Served, kind: str) -> None:
    job = f"bad {kind}"
    with dealer(served.pool) as peer:
        peer.send(msgspec.msgpack.encode(Status("good", 10_000, "1", [])))
        give(served, job)
        parts = list(RESULT[1:])
        if kind == "of a token below 0":
            parts[1] = b"\xff" * len(parts[1])
        elif kind == "damaged":
            parts[0] = b"\x91" * 100_000
        head = Result(job, [] if kind == "missing" else FRAMES)
        peer.send_multipart(to_chunks([msgspec.msgpack.encode(head), *([] if kind == "missing" else parts)]))
        found = until(lambda: [outcome for name, outcome in served.results if name == job])
    failure = found[0]
    assert isinstance(failure, job_protocol.JobFailure) and failure.error.startswith("damaged result: ")
    is_served(served)


def test_huge_error_is_truncated_by_sender_and_receiver(served: Served) -> None:
    text = "begin" + "x" * (8 << 20) + "end"
    short = job_protocol.shortened(text)
    assert len(short) < 2 * job_protocol.LONGEST_ERROR and short.startswith("begin") and short.endswith("end")
    with dealer(served.pool) as peer:
        peer.send_multipart(to_chunks([msgspec.msgpack.encode(job_protocol.Unusable("e", 0, text))]))
        until(lambda: short in served.unusable)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


STRANGERS = 50


@pytest.mark.parametrize("port", ["link", "pool"])
def test_strangers_cannot_exhaust_the_orchestrators_memory(served: Served, port: str) -> None:
    """A handshake message, which comes before authentication, may be as long as any other frame."""
    host, number = getattr(served, port).removeprefix("tcp://").split(":")
    largest = {"link": LARGEST_REQUEST, "pool": MAX_FRAME_BYTES}[port]
    before = psutil.Process().memory_info().rss
    with contextlib.ExitStack() as strangers:
        for _ in range(STRANGERS):
            peer = strangers.enter_context(socket.create_connection((host, int(number)), timeout=60))
            peer.sendall(GREETING)
            peer.recv(64)
            # exactly as much as is accepted, so that the connection stays open
            peer.sendall(b"\x06" + struct.pack(">Q", largest) + bytes(largest - 1))
        taken = psutil.Process().memory_info().rss - before
        peer = strangers.enter_context(socket.create_connection((host, int(number)), timeout=60))
        peer.sendall(GREETING)
        peer.recv(64)
        sent = 0
        with contextlib.suppress(OSError):
            peer.sendall(b"\x06" + struct.pack(">Q", largest + 1))
            for _ in range(256):
                peer.sendall(bytes(1 << 20))
                sent += 1
        assert sent < 128, "who announces more is disconnected"
        is_served(served)
    assert taken < STRANGERS * largest + (32 << 20) and STRANGERS * largest < 16 << 20
    is_served(served)


def test_result_of_the_longest_rollouts_arrives_in_chunks(served: Served) -> None:
    """131,072 tokens of GLM-5 with router replay, 79 MB, through a port with frames of at most 64 KiB."""
    experts = np.arange(131_072 * 75 * 8, dtype=np.uint32).astype(np.uint8).reshape(131_072, 75, 8)
    long = replace(rollout(131_072), routed_experts=experts)
    with dealer(served.pool) as peer:
        peer.send(msgspec.msgpack.encode(Status("good", 20_000, "1", [])))
        give(served, "long")
        peer.send_multipart(to_chunks(job_protocol.encode_result("long", (long,))), copy=False)
        (found,) = until(lambda: [outcome for name, outcome in served.results if name == "long"])
    assert not isinstance(found, str)
    assert np.array_equal(found[0].routed_experts, experts)


def test_unsplit_frame_is_not_copied() -> None:
    whole, long = b"w" * CHUNK_BYTES, b"l" * (3 * CHUNK_BYTES + 1)
    parts = to_chunks([whole, b"", long])
    assert [len(part) for part in parts[1:]] == [CHUNK_BYTES] * 4 + [1] and max(map(len, parts)) <= MAX_FRAME_BYTES
    found = join_frames([memoryview(part) for part in parts])
    assert [bytes(part) for part in found] == [whole, b"", long]
    assert to_chunks([whole]) == [whole] == join_frames([whole])


@fuzzed(0.5)
@given(st.lists(st.integers(0, 4 * CHUNK_BYTES), min_size=1, max_size=5).map(lambda sizes: [bytes(n) for n in sizes]))
def test_split_messages_are_joined(parts: list[bytes]) -> None:
    assert [bytes(part) for part in join_frames(list(to_chunks(parts)))] == parts


CUT = [bytes(part) for part in to_chunks([b"head", bytes(2 * CHUNK_BYTES + 5), b""])]


@fuzzed(0.5)
@given(messages(CUT))
def test_mismatched_chunks_are_damaged(parts: list[bytes]) -> None:
    with contextlib.suppress(DamagedError):
        assert sum(map(len, join_frames(list(parts)))) <= sum(map(len, parts))


@pytest.mark.parametrize("lengths", [[2**62], [2**62, -(2**62)], [1] * 5, [0], [], "x", [[1]], [1.5]])
def test_stated_lengths_are_not_trusted(lengths: object) -> None:
    stated = msgspec.msgpack.encode(lengths)
    with pytest.raises(DamagedError):
        join_frames([b"\xc1" + len(stated).to_bytes(4, "big") + stated, b"abc"])


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000, GREETING[:20], GREETING * 9])
def test_client_without_zmq_is_disconnected(served: Served, data: bytes) -> None:
    for address in (served.link, served.pool):
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as peer, contextlib.suppress(OSError):
            peer.sendall(data)
    is_served(served)


def test_damaged_batch_is_reported_to_the_trainer() -> None:
    """It must not fail with a struct.error, or wait ten minutes for another response."""
    with zmq.Context.instance().socket(zmq.REP) as fake:
        curve.secure_server(fake)
        fake.setsockopt(zmq.LINGER, 0)
        port = fake.bind_to_random_port("tcp://127.0.0.1")
        parts = [msgspec.msgpack.encode(Answer("batch")), b"\x91" * 100_000]
        thread = threading.Thread(target=lambda: (fake.recv(), fake.send_multipart(parts), fake.recv(), fake.send(b"")))
        thread.start()
        client = TrainerLink(f"tcp://127.0.0.1:{port}", timeout_s=60)
        with pytest.raises(trainer_link.LinkError, match="the batch of step 1 is damaged"):
            client.get_batch(1, RankShard(0, 1), timeout_s=60)
        with pytest.raises(trainer_link.LinkError, match="sent a damaged answer"):
            client.step_done(1, {})
        client.close()
        thread.join()


@contextlib.contextmanager
def said_to(kind: int) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """Act as an orchestrator that sends arbitrary data to clients with the secret."""
    with zmq.Context.instance().socket(kind) as fake:
        curve.secure_server(fake)
        fake.setsockopt(zmq.LINGER, 0)
        yield fake, f"tcp://127.0.0.1:{fake.bind_to_random_port('tcp://127.0.0.1')}"


BATCH_ANSWER = [msgspec.msgpack.encode(Answer("batch")), *(bytes(part) for part in batch().encode())]
ANSWERS = [{"kind": kind} for kind in ("wait", "stop", "transfer", "batch", "error", "ok")] + [WORDS[-1]]


@pytest.fixture(scope="module")
def trainer() -> Iterator[tuple[list[list[bytes]], TrainerLink]]:
    """Return a trainer's link, and the list of its responses, of which the last is repeated."""
    answers_: list[list[bytes]] = []
    ended = threading.Event()

    def answer(fake: zmq.Socket[bytes]) -> None:
        while not ended.is_set():
            if fake.poll(50):
                fake.recv()
                fake.send_multipart(answers_.pop(0) if len(answers_) > 1 else answers_[0])

    with said_to(zmq.REP) as (fake, address):
        thread = threading.Thread(target=answer, args=(fake,))
        thread.start()
        found = TrainerLink(address, timeout_s=60, empty=lambda size: np.zeros(size, np.uint8))
        yield answers_, found
        found.close()
        ended.set()
        thread.join()


@fuzzed()
@given(
    messages(BATCH_ANSWER) | st.sampled_from(ANSWERS).flatmap(trees).map(lambda each: [_packed(each)]), st.booleans()
)
def test_trainer_gets_a_batch_or_its_one_error(
    trainer: tuple[list[list[bytes]], TrainerLink], monkeypatch: pytest.MonkeyPatch, parts: list[bytes], first: bool
) -> None:
    monkeypatch.setattr(trainer_link, "LARGEST_BATCH", 1 << 20)
    answers_, asking = trainer
    answers_[:] = [BATCH_ANSWER[:2], parts or [b""]] if first else [parts or [b""]]
    try:
        found = asking.get_batch(1, RankShard(0, 1), timeout_s=0)
        assert found is None or found.info.step == 1
    except (trainer_link.LinkError, trainer_link.TransferWanted):
        pass
    answers_[:] = [BATCH_ANSWER]
    assert asking.get_batch(1, RankShard(0, 1), timeout_s=60) is not None


@pytest.fixture(scope="module")
def worker() -> Iterator[tuple[zmq.Socket[bytes], bytes]]:
    """Return a socket that sends jobs to a worker, and the worker's name. All its rollouts fail."""
    ended = threading.Event()

    async def fails(job: Job) -> tuple[Rollout, ...]:
        raise job_protocol.RolloutError(f"as told: {job.id}")

    async def serve(address: str) -> None:
        serving = asyncio.create_task(JobRunner("e", 0, address, fails).serve())
        while not ended.is_set() and not serving.done():
            await asyncio.sleep(0.02)
        alive.append(not serving.done())
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    alive: list[bool] = []
    with said_to(zmq.ROUTER) as (fake, address):
        thread = threading.Thread(target=lambda: asyncio.run(serve(address)))
        thread.start()
        assert fake.poll(WAIT_MS)
        yield fake, fake.recv_multipart()[0]
        ended.set()
        thread.join()
    assert alive == [True], "it served to the end"


TOLD = [word for word in WORDS if word.get("type") in ("Cancel", "Describe", "Send")]
CANCEL = [msgspec.msgpack.encode(TOLD[0]), b"more"]


@fuzzed()
@given(
    st.lists(st.sampled_from(TOLD).flatmap(trees).map(lambda each: [_packed(each)]) | messages(CANCEL), max_size=4),
    st.integers(0, 2**62),
)
def test_worker_survives_any_message(
    worker: tuple[zmq.Socket[bytes], bytes], wrong: list[list[bytes]], number: int
) -> None:
    fake, who = worker
    for parts in [*wrong, [_packed(Job(f"last {number}", "g", "e", 0, 0, "r", "s"))]]:
        fake.send_multipart([who, *(parts or [b""])])
    said = b""
    while f"as told: last {number}".encode() not in said:
        assert fake.poll(WAIT_MS), "it runs no more jobs"
        said = b"".join(fake.recv_multipart()[1:])


def test_strangers_messages_are_accepted_without_a_secret() -> None:
    """`tests/emulated` sends the same to every port of a run, where it is refused."""
    said = MESSAGES["a client of ZMQ"]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as open_one:
        port = open_one.bind_to_random_port("tcp://127.0.0.1")
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(said[:64])
            with client.makefile("rb") as heard:  # it arrives in chunks
                assert heard.read(64)[12:16] == b"NULL"
            client.sendall(said[64:])
            assert open_one.poll(WAIT_MS) and open_one.recv_multipart()[1:] == [b"", ASKED]
    assert isinstance(msgspec.msgpack.decode(ASKED, type=Request), GetBatch)
