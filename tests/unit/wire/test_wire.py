"""Arrays, rollouts, files, checkpoints, versions, and the link between trainer and orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.ports import free_port
from primeslurm.base.files import read_json, write_atomic, write_json
from primeslurm.orchestrator.rollouts import job_protocol
from primeslurm.records.events import decode
from primeslurm.records.events.training import TrainerStarted
from primeslurm.records.journal import Journal
from primeslurm.records.state import TrainerState
from primeslurm.trainer.loops.rl import Prefetch
from primeslurm.wire.batches import routed_experts
from primeslurm.wire.batches.batch import Batch, BatchInfo, RankShard, Row
from primeslurm.wire.batches.frames import Frame, IncomingArrays, assembled, from_frames, to_frames
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo, prefill_tag
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.link import orchestrator_link
from primeslurm.wire.link.messages import Answer, GetBatch, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport import curve
from primeslurm.wire.weight_transfer import filesystem, tensor_names
from primeslurm.wire.weight_transfer.messages import NewPolicy
from tests.support.waiting import wait_until

arrays = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.tuples(
        st.sampled_from(["<i4", "<f4", "|b1", "<i8", "|u1"]), st.lists(st.integers(0, 5), min_size=1, max_size=3)
    ),
    max_size=5,
)


@given(st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63), max_size=4), arrays)
def test_arrays_are_encoded_and_decoded(meta: dict[str, int], specs: dict[str, tuple[str, list[int]]]) -> None:
    rng = np.random.default_rng(0)
    given_arrays = {name: rng.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in specs.items()}
    message = [bytes(frame) for frame in to_frames(meta, given_arrays)]
    found_meta, found = from_frames(message, dict[str, int])
    assert found_meta == meta
    assert list(found) == list(given_arrays)
    for name, array in given_arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_message_without_a_buffer_is_refused() -> None:
    message = to_frames({}, {"a": np.zeros(3)})
    with pytest.raises(ValueError, match="0 buffers, but the header names 1"):
        from_frames(message[:1], dict)


def rollout(versions: list[int]) -> Rollout:
    n = len(versions)
    info = RolloutInfo("r", "g", "e", opened_version=3, reward=0.5, metrics={"exact": 1.0})
    array = np.array(versions, np.int32)
    return Rollout(info, np.arange(n, dtype=np.int32), array >= 0, np.zeros(n, np.float32), array)


@pytest.mark.parametrize(
    ("versions", "oldest", "mixed"),
    [([-1, -1], 3, False), ([-1, 4, 4], 4, False), ([-1, 4, 5], 4, True), ([prefill_tag(3), 4, 4], 4, True)],
)
def test_rollout_versions(versions: list[int], oldest: int, mixed: bool) -> None:
    found = Rollout.decode([bytes(frame) for frame in rollout(versions).encode()])
    assert (found.oldest_version, found.is_mixed, found.info) == (oldest, mixed, rollout(versions).info)


ROW = {"token_ids": np.int32, "positions": np.int32, "mask": np.bool_, "logprobs": np.float32}
ROW |= {"advantages": np.float32, "temperatures": np.float32, "on_policy": np.bool_}


def batch(step: int = 1) -> Batch:
    rows = [Row(**{name: np.full(4, i, kind) for name, kind in ROW.items()}) for i in range(2)]
    rows = [replace(row, positions=np.array([0, 1, 0, 1 - i], np.int32)) for i, row in enumerate(rows)]
    return Batch(BatchInfo(step, 0, 1, 8), rows)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routed_experts_are_encoded_if_present(dtype: type) -> None:
    choices = np.arange(4 * 3 * 2, dtype=dtype).reshape(4, 3, 2)
    plain = rollout([-1, -1, 3, 3])
    both = (replace(plain, routed_experts=choices), plain)
    head, *buffers = [bytes(frame) for frame in job_protocol.encode_result("j", both)]
    result = msgspec.msgpack.decode(head, type=job_protocol.Result)
    routed, without = job_protocol.decode_sequences(result, buffers)
    assert routed.routed_experts is not None and routed.routed_experts.dtype == dtype
    assert np.array_equal(routed.routed_experts, choices) and without.routed_experts is None
    with pytest.raises(ValueError, match="10 frames for sequences of"):
        job_protocol.decode_sequences(result, buffers[1:])

    sent = Batch(batch().info, [replace(row, routed_experts=choices + i) for i, row in enumerate(batch().rows)])
    for i, row in enumerate(Batch.decode([bytes(frame) for frame in sent.encode()]).rows):
        assert row.routed_experts is not None and row.routed_experts.dtype == dtype
        assert np.array_equal(row.routed_experts, choices + i)


def test_unknown_routed_experts_are_the_largest_value() -> None:
    part = np.arange(4, dtype=np.uint16).reshape(2, 1, 2)
    joined = routed_experts.join([None, part, None], [1, 2, 1], part)
    assert joined.tolist() == [[[65535, 65535]], [[0, 1]], [[2, 3]], [[65535, 65535]]]
    with pytest.raises(ValueError, match="uint8"):
        routed_experts.join([part.astype(np.uint8)], [2], part)


def test_failed_atomic_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "{}")
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert read_json(tmp_path / "none") is None


def test_full_disk_does_not_stop_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, "p")
    journal.write(TrainerStarted(1))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    journal.write(TrainerStarted(2))
    journal.state(TrainerState(1))
    monkeypatch.undo()
    (line,) = (tmp_path / "events" / "p.jsonl").read_bytes().splitlines()
    assert isinstance(event := decode(line), TrainerStarted) and (event.pid, event.process) == (1, "p")


def publish(run: Path, version: int) -> Path:
    directory = filesystem.version_dir(run, version)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(bytes([version]))
    filesystem.complete(directory, version, "float32")
    return directory


def test_version_exists_once_its_manifest_does(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    (filesystem.version_dir(tmp_path, 2)).mkdir()
    assert filesystem.published(tmp_path) == [1]
    assert filesystem.damage(first) == []
    (first / "model.safetensors").write_bytes(b"x")
    assert filesystem.damage(first) == [f"{first}/model.safetensors: differs from its record"]
    assert filesystem.damage(tmp_path) == [f"{tmp_path}: no readable MANIFEST.json"]


def test_names_of_draft_layers() -> None:
    draft = "mtp.layers.0.input_layernorm.weight"
    names = [f"model.layers.{number}.input_layernorm.weight" for number in (6, 7, 60, 61, 62, 610)] + [draft]
    found = [name for name in names if tensor_names.layers_ahead(61, 1).fullmatch(name)]
    assert found == ["model.layers.61.input_layernorm.weight", draft]
    assert [name for name in names if tensor_names.layers_ahead(61, 0).fullmatch(name)] == [draft]


def test_stack_may_be_present_expert_by_expert() -> None:
    gate_up, down = (f"model.layers.3.mlp.experts.{part}_proj" for part in ("gate_up", "down"))
    one = {f"model.layers.3.mlp.experts.0.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert tensor_names.absent({gate_up, down, "x"}, {*one, "x"}) == set()
    assert tensor_names.absent({gate_up, down, "x"}, {gate_up, down}) == {"x"}
    for name in one:
        assert tensor_names.absent({gate_up, down}, one - {name}) == {down if "down" in name else gate_up}
    assert tensor_names.absent(one, {gate_up, down}) == one, "only stacks of the model itself may be present one by one"


def test_needed_versions_are_not_pruned(tmp_path: Path) -> None:
    for version in range(1, 7):
        publish(tmp_path, version)
    assert filesystem.prune(tmp_path, keep=2, needed={2}) == [1, 3, 4]
    assert filesystem.published(tmp_path) == [2, 5, 6]


def save(run: Path, step: int, committed: bool = True) -> Path:
    directory = checkpoints.step_dir(run, step)
    (directory / "trainer").mkdir(parents=True)
    (directory / "trainer" / "part").write_text("x")
    if committed:
        checkpoints.commit(directory, step, attempt=1)
    return directory


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    first = save(tmp_path, 5)
    save(tmp_path, 10, committed=False)
    assert checkpoints.newest(tmp_path) == 5
    assert checkpoints.damage(first) == []
    (first / "trainer" / "part").unlink()
    assert checkpoints.damage(first) == [f"{first}/trainer/part: does not exist"]
    (first / "trainer" / "part").write_text("xy")
    assert checkpoints.damage(first) == [f"{first}/trainer/part: differs from its record: 2 bytes instead of 1"]
    (first / "trainer" / "part").write_text("y")
    assert checkpoints.damage(first) == [f"{first}/trainer/part: differs from its record"]
    assert checkpoints.damage(checkpoints.step_dir(tmp_path, 10))[0].endswith("not committed")


def test_pruning_keeps_newest_and_unfinished_checkpoints(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path, step)
    save(tmp_path, 12, committed=False)
    save(tmp_path, 20, committed=False)
    assert checkpoints.prune(tmp_path, keep=2) == [5, 12]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["NEWEST", "step_000010", "step_000015", "step_000020"]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from {module} import prune

def die(directory, **options):
    os.kill(os.getpid(), signal.SIGKILL)

shutil.rmtree = die
prune(Path(sys.argv[1]), 1, set())
"""


@pytest.mark.parametrize(
    ("make", "store", "directory"),
    [(publish, filesystem, filesystem.version_dir), (save, checkpoints, checkpoints.step_dir)],
    ids=["policies", "checkpoints"],
)
def test_interrupted_deletion_is_completed(
    make: Callable[[Path, int], Path], store: Any, directory: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    (beside := tmp_path / "weights" / "mine").mkdir(parents=True)
    for number in (1, 2):
        make(tmp_path, number)
    command = [sys.executable, "-c", KILLED.format(module=store.__name__), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert directory(tmp_path, 1).is_dir(), "incomplete, but still there"
    assert store.prune(tmp_path, 1, set()) == [1]
    assert not directory(tmp_path, 1).exists() and directory(tmp_path, 2).exists() and beside.is_dir()


class Server:
    """An orchestrator's end of the link in a thread, answering with `answer`."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.formed = threading.Event()
        """Answers are held until it is set."""
        self.formed.set()
        self.address = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def answer(self, request: Request) -> Sequence[Frame] | Answer:
        self.seen.append(request)
        while not self.formed.is_set():
            await asyncio.sleep(0.01)
        if isinstance(request, GetBatch):
            return batch(request.step).encode() if request.step < 3 else Answer("stop" if request.step == 3 else "wait")
        if isinstance(request, NewPolicy) and request.version < 0:
            raise ValueError("no such version")
        return Answer("ok")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    async def _serve(self) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.link = OrchestratorLink(self.address, self.answer)
        self._ready.set()
        await self.link.serve()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(60)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def test_batches_are_received_until_stop(server: Server) -> None:
    trainer_link = TrainerLink(server.address)
    found = trainer_link.get_batch(1, RankShard(0, 1), timeout_s=60)
    assert found is not None
    assert found.info == batch(1).info
    for row, expected in zip(found.rows, batch().rows, strict=True):
        assert all(np.array_equal(getattr(row, name), getattr(expected, name)) for name in ROW)
        assert row.routed_experts is None
    assert trainer_link.get_batch(3, RankShard(0, 1), timeout_s=60) is None
    trainer_link.close()


def test_lost_answer_is_requested_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = list[bytes](), server.link._socket.send_multipart

    async def losing(parts: list[bytes], **options: bool) -> None:
        sent.append(parts[0])
        if len(sent) > 1:
            await send(parts, **options)

    monkeypatch.setattr(server.link._socket, "send_multipart", losing)
    trainer_link = TrainerLink(server.address, timeout_s=60, retry_s=0.3)
    trainer_link.announce(1, "/w")
    wait_until(lambda: len(server.seen) == len(sent))
    assert server.seen == [NewPolicy(1, "/w")] * len(sent) and len(set(sent)) == len(sent) >= 2
    trainer_link.close()


def test_repeated_request_is_answered_once_to_the_latest_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, receive = list[object](), server.link._socket.recv_multipart

    async def noted() -> list[bytes]:
        received.append(parts := await receive())
        return parts

    monkeypatch.setattr(server.link._socket, "recv_multipart", noted)
    trainer_link = TrainerLink(server.address)
    trainer_link.announce(1, "/w")  # from now on, messages are recorded
    trainer_link.close()
    server.formed.clear()
    request = GetBatch(1, RankShard(0, 1))
    sockets = [zmq.Context.instance().socket(zmq.REQ) for _ in range(3)]
    for number, socket in enumerate(sockets, 1):
        curve.secure_client(socket)
        socket.connect(server.address)
        socket.send(msgspec.msgpack.encode(request))
        while len(received) < number:
            time.sleep(0.01)
    server.formed.set()
    _, *frames = sockets[-1].recv_multipart()
    assert frames == [bytes(frame) for frame in batch(1).encode()]
    assert server.seen == [NewPolicy(1, "/w"), request] and server.link.sent_bytes == sum(map(len, frames))
    assert not any(socket.poll(0) for socket in sockets)
    for socket in sockets:
        socket.close(linger=0)


def test_large_batch_is_sent_in_chunks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = batch(1).encode()
    size = sum(map(len, frames[1:]))
    monkeypatch.setattr(orchestrator_link, "CHUNK_BYTES", 10)
    link_ = TrainerLink(server.address)
    found = link_.get_batch(1, RankShard(0, 1), timeout_s=60)
    assert found is not None
    assert [bytes(frame) for frame in found.encode()] == [bytes(frame) for frame in frames]
    offsets = [request.offset for request in server.seen if isinstance(request, GetBatch)]
    assert offsets == list(range(0, size, 10))
    assert server.link.sent_bytes == size + len(frames[0])
    link_.close()


def test_interrupted_prefetch_does_not_receive_a_batch(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = batch(1).encode()
    monkeypatch.setattr(orchestrator_link, "CHUNK_BYTES", 10)
    server.formed.clear()
    link_ = TrainerLink(server.address)
    ahead = Prefetch(link_, RankShard(0, 1), timeout_s=60)
    ahead.begin(1)
    while not server.seen:
        time.sleep(0.01)
    assert ahead.take(1) is None, "the trainer has finished its step, and requests the batch itself"
    server.formed.set()
    assert link_.get_batch(1, RankShard(0, 1), timeout_s=60) is not None
    for thread in threading.enumerate():
        if thread.name == "prefetch":
            thread.join()
    also_one_chunk = sum(map(len, frames)) + len(frames[0]) + 10  # of the other answer
    wait_until(lambda: server.link.sent_bytes >= also_one_chunk)
    assert server.link.sent_bytes == also_one_chunk
    link_.close()


def test_timeout_of_a_slow_chunk_doubles(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.formed.clear()
    waits, wait = list[float](), TrainerLink._is_answered

    def noted(trainer_link: TrainerLink, socket: zmq.Socket[bytes], patience_s: float) -> bool:
        waits.append(patience_s)
        if len(waits) == 3:
            server.formed.set()
        return wait(trainer_link, socket, patience_s)

    monkeypatch.setattr(TrainerLink, "_is_answered", noted)
    link_ = TrainerLink(server.address, timeout_s=60, retry_s=0.1)
    assert link_.get_batch(1, RankShard(0, 1), timeout_s=60) is not None
    assert waits[:3] == [0.1, 0.2, 0.4]
    link_.close()


def test_more_bytes_than_announced_are_refused() -> None:
    head, *rest = batch(1).encode()
    with pytest.raises(DamagedError, match="more bytes than"):
        assembled([head, *rest, b"x"])
    with pytest.raises(DamagedError, match="144 bytes are announced, of at most 136"):
        assembled([head, *rest[:-1]])
    with pytest.raises(DamagedError, match="are announced, of at most 3"):
        IncomingArrays(head, lambda size: np.empty(size, np.uint8), 3)


def test_waiting_ends_at_the_deadline_or_by_interruption(server: Server) -> None:
    trainer_link = TrainerLink(server.address, timeout_s=60, retry_s=1)
    with pytest.raises(LinkError, match="no batch for step 9 within 0 s"):
        trainer_link.get_batch(9, RankShard(0, 1), timeout_s=0)
    assert trainer_link.get_batch(9, RankShard(0, 1), timeout_s=60, interrupted=lambda: len(server.seen) > 3) is None
    with pytest.raises(LinkError, match="ValueError: no such version"):
        trainer_link.announce(-1, "/w")
    trainer_link.close()


def test_missing_peer_raises_an_error() -> None:
    trainer_link = TrainerLink("tcp://127.0.0.1:1", timeout_s=0.5, retry_s=0.2)
    with pytest.raises(LinkError, match=r"did not answer .* within 0 s"):
        trainer_link.step_done(1, {})
    trainer_link.close()
