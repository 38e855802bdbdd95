"""Truncated, flipped or foreign files of a run. Each reader reports them in one way."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.base.errors import ClusterError, RunError
from primeslurm.base.files import FileWatcher, read_json
from primeslurm.orchestrator.dispatch import curricula
from primeslurm.orchestrator.evaluation.results import Archive, EvaluationHeader, Sample
from primeslurm.orchestrator.pipeline.progress import PROGRESS, RunProgress, restore
from primeslurm.orchestrator.rollouts import worker_deaths
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.plan import plan_file
from primeslurm.records import events, metrics, reading
from primeslurm.records.events.training import StepReported
from primeslurm.records.heartbeats import Heartbeat, HeartbeatPage, LivenessReporter
from primeslurm.records.metrics import MetricsLog
from primeslurm.records.state import OrchestratorState
from primeslurm.run.bad_nodes import BadNodeLedger
from primeslurm.run.directory import Attempt
from primeslurm.run.status.plan_outline import read_outline
from primeslurm.slurm.inventory import _parse
from primeslurm.wire import probe_messages
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.stored.manifest import FileRecord
from primeslurm.wire.transport.addresses import FILE, AddressBook
from primeslurm.wire.weight_transfer import filesystem
from primeslurm.wire.weight_transfer.filesystem import WeightManifest
from primeslurm.wire.weight_transfer.messages import NewPolicy
from tests.unit.fuzz.mutations import bounded, fuzzed, texts, trees


def damaged(valid: Any) -> st.SearchStrategy[bytes]:
    """Draw a JSON file that is truncated, flipped or replaced."""
    return texts(lines(valid)) | trees(valid).map(lines)


def lines(value: Any) -> bytes:
    """Encode JSON as Python does: with NaN and lone surrogates."""
    return json.dumps(value, default=lambda each: each.decode("latin-1")).encode() + b"\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


ADDRESSES = {"hosts": {"engine": "h"}, "ports": {"engine": {"http": 1}}, "lost": ["x"]}


@fuzzed()
@given(damaged(ADDRESSES))
def test_watched_json_files(directory: Path, data: bytes) -> None:
    path = directory / FILE
    path.write_bytes(data)
    with bounded(len(data), factor=64):
        read_json(path)
        FileWatcher(path).changed()
    try:
        assert AddressBook(directory).url("engine").startswith("http://")
    except LookupError:
        return


def test_damaged_address_book_keeps_the_last_addresses(tmp_path: Path) -> None:
    """An orchestrator or a worker must not end because of it, as the head writes the file again."""
    now = 0.0
    (tmp_path / FILE).write_bytes(lines(ADDRESSES))
    book = AddressBook(tmp_path, lambda: now)
    assert book.url("engine") == "http://h:1"
    for data in (b"[]", b"\xff", b"[" * 100_000, b'{"hosts": 1}', b""):
        (tmp_path / FILE).write_bytes(data)
        now += 10
        assert book.url("engine") == "http://h:1"


STATE = {"step": 1, "max_steps": 2, "version": 1, "inflight": 0, "time": 1.0, "process": "o", "counts": {"x": 1}}


@fuzzed()
@given(damaged(STATE))
def test_records(directory: Path, data: bytes) -> None:
    path = directory / "state.json"
    path.write_bytes(data)
    with bounded(len(data), factor=64):
        found = reading.find_record(path, OrchestratorState)
    assert found is None or isinstance(found, OrchestratorState)


EVENT = {**msgspec.to_builtins(StepReported(3, 0.5)), "time": 1.0, "process": "o"}


@fuzzed(2)
@given(damaged(EVENT))
def test_events(data: bytes) -> None:
    with bounded(len(data), factor=64):
        for line in data.split(b"\n"):
            events.decode(line)


ROWS = [{"step": 1, "time": 1.0, "loss": 0.5, "seconds/data": 1.0}, {"step": 2, "time": 2.0, "reward/mean": 1.0}]


@fuzzed()
@given(st.lists(st.sampled_from(ROWS).flatmap(damaged), min_size=1, max_size=3))
def test_metrics(directory: Path, data: list[bytes]) -> None:
    path = directory / "metrics.jsonl"
    path.write_bytes(b"\n".join([lines(ROWS[1]), *data, b""]))
    for row in (*metrics.rows(path), *metrics.recent_rows(path)):
        assert isinstance(row, dict)
    log = MetricsLog(directory, 2, tensorboard=False)
    log.write(3, {"reward/mean": 1.0})
    log.close()
    assert metrics.rows(path)[-1]["step"] == 3
    assert any(row["step"] == 2 for row in metrics.rows(path))


RECORD = {"name": "model-00000.safetensors", "bytes": 10, "digest": "00"}
COMMIT = {"step": 10, "attempt": 1, "parts": [RECORD]}
WEIGHTS = {"version": 10, "layout": "hf", "dtype": "bfloat16", "files": [RECORD]}


@fuzzed()
@given(damaged(COMMIT) | damaged(WEIGHTS))
def test_manifests(directory: Path, data: bytes) -> None:
    step = checkpoints.step_dir(directory, 10)
    step.mkdir(parents=True, exist_ok=True)
    for name in (checkpoints.COMMITTED, filesystem.MANIFEST):
        (step / name).write_bytes(data)
    with bounded(len(data), factor=64):
        found = checkpoints.read_commit(step)
        wrong = checkpoints.damage(step)
        assert bool(wrong) == (found is None or bool(found.parts)), "no file that it names is there"
        filesystem.damage(step)
        assert set(checkpoints.committed(directory)) <= {10}


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/../../b", "", ".", "a" * 256, "\0"])
def test_manifest_names_only_files_below_its_directory(tmp_path: Path, name: str) -> None:
    for kind, value, file in (
        (checkpoints.Commit, {**COMMIT, "parts": [{**RECORD, "name": name}]}, checkpoints.COMMITTED),
        (WeightManifest, {**WEIGHTS, "files": [{**RECORD, "name": name}]}, filesystem.MANIFEST),
    ):
        with pytest.raises(msgspec.ValidationError, match="below the manifest's directory"):
            msgspec.json.decode(lines(value), type=kind)
        (tmp_path / file).write_bytes(lines(value))
    assert checkpoints.read_commit(tmp_path) is None and filesystem.read_manifest(tmp_path) is None
    assert FileRecord("trainer/rank-0/a..b.distcp", 1, "0").name


PROGRESS_BYTES = msgspec.msgpack.encode(
    RunProgress(
        2, 3, 2, NewPolicy(2, "/w"), {"e": 3}, [("e", 1)], {3: ["e-0"]}, 2, {"e-0": 1}, {}, {}, 0, {3: {"m": 1.0}}
    )
)


@fuzzed()
@given(texts(PROGRESS_BYTES) | trees(msgspec.msgpack.decode(PROGRESS_BYTES)).map(msgspec.msgpack.encode))
def test_orchestrator_progress(directory: Path, data: bytes) -> None:
    path = directory / "run" / PROGRESS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    with bounded(len(data), factor=64):
        found = restore(directory / "run", 2)
    assert found.attempt == 2


@pytest.mark.parametrize("data", [b"", b"\x91" * 100_000, b"\xff", PROGRESS_BYTES[:20]])
def test_missing_orchestrator_state_is_reported(tmp_path: Path, data: bytes) -> None:
    step = checkpoints.step_dir(tmp_path, 10)
    step.mkdir(parents=True)
    (step / "orchestrator.bin").write_bytes(data)
    checkpoints.commit(step, 10, 1)
    with pytest.raises(RunError, match=r"orchestrator\.bin cannot be read"):
        restore(tmp_path, 2)


OUTCOMES = b'["e-00000000",3,0.5]\n["e-00000001",4,1.0]\n'


@fuzzed()
@given(texts(OUTCOMES))
def test_outcomes_of_curricula(directory: Path, data: bytes) -> None:
    path = directory / "outcomes.jsonl"
    path.write_bytes(OUTCOMES + data + b"\n" + OUTCOMES)
    found = list(curricula._read(path, path.stat().st_size))
    assert found[:2] == found[-2:] == [("e-00000000", 3, 0.5), ("e-00000001", 4, 1.0)]
    assert all(isinstance(task, int) for _, task, _ in found)


BEGUN = msgspec.to_builtins(EvaluationHeader(10, 10, 1.0))
SAMPLE = msgspec.to_builtins(Sample("e", 1, 2, reward=0.5))


@fuzzed()
@given(damaged(BEGUN) | st.just(lines(BEGUN)), st.lists(damaged(SAMPLE), max_size=2))
def test_unfinished_evaluations(directory: Path, begun: bytes, samples: list[bytes]) -> None:
    path = directory / "run" / "evaluations" / "step-000010" / "progress.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join([begun, *samples, lines(SAMPLE)]))
    found = Archive(directory / "run").unfinished()
    if begun == lines(BEGUN):
        assert found is not None and found[1][-1].sample == 2


DEATHS = {
    "suspects": {"e-00000001": {"deaths": 2, "alone": 1, "together": 1, "worker": 0}},
    "guilty": {"e-00000002": 3, "a/b-00000003@7": 2},
}


@fuzzed()
@given(damaged(DEATHS) | st.just(lines(DEATHS)))
def test_deaths_of_workers(directory: Path, data: bytes) -> None:
    path = directory / "run" / worker_deaths.PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    found = worker_deaths.load(directory / "run")
    job = Job("j", "g", "e", 1, 0, "r", "s")
    assert found.together(job) is None or found.together(job) >= 1
    assert all(example >= 0 for _, example in worker_deaths.example_positions(found.guilty))
    assert data != lines(DEATHS) or set(found.guilty) == set(DEATHS["guilty"])


ENTRY = {"node": "n", "reason": "r", "run": "r", "attempt": 1, "time": 1.0, "expires": 9e9}


@fuzzed()
@given(damaged(ENTRY))
def test_bad_nodes(directory: Path, data: bytes) -> None:
    (directory / ".bad-nodes").mkdir(exist_ok=True)
    (directory / ".bad-nodes" / "a.json").write_bytes(data)
    (directory / ".bad-nodes" / "b.json").write_bytes(lines({**ENTRY, "node": "other"}))
    assert "other" in {entry.node for entry in BadNodeLedger(directory).entries(10.0)}


FOLDED = {
    "run_dir": "/r",
    "nodes": {"templates": [{"name": "n%(0)", "processes": 2}], "rows": [[0, i] for i in range(3)]},
    "processes": {"templates": [{"name": "p-%(0)", "port": {"%": "%(0+8000)"}}], "rows": [[0, i] for i in range(6)]},
    "replicas": {"templates": [{"router": "r-0"}], "rows": [[0]]},
}


@fuzzed(2)
@given(damaged(FOLDED))
def test_plans(directory: Path, data: bytes) -> None:
    attempt = Attempt(directory / "run", 1)
    attempt.plan_file.parent.mkdir(parents=True, exist_ok=True)
    attempt.plan_file.write_bytes(data)
    with contextlib.suppress(RunError):
        read_outline(attempt)
    try:
        with bounded(len(data), factor=64):
            assert isinstance(plan_file.plain(data), dict)
        plan_file.from_file(data)
    except ValueError:
        return


@pytest.fixture(scope="module")
def page() -> Iterator[HeartbeatPage]:
    found = HeartbeatPage("p")
    yield found
    found.close()


PAGE = LivenessReporter()
PAGE.enter("train", 3, 60.0)
BEAT = bytes(PAGE._page[:136])


@fuzzed(2)
@given(texts(BEAT) | st.floats().map(lambda limit: BEAT[:16] + struct.pack("<d", limit) + BEAT[24:]))
def test_beats(page: HeartbeatPage, data: bytes) -> None:
    """A process that overwrites its heartbeat page must not appear alive forever."""
    page._page[: len(BEAT)] = data[: len(BEAT)].ljust(len(BEAT), b"\xff")
    found = page.read()
    assert isinstance(found, Heartbeat) and math.isfinite(found.limit_s) and found.limit_s >= 0
    page._page[: len(BEAT)] = BEAT
    assert page.read() == Heartbeat(1, "train", 3, 60.0, 0)


PROBED = {
    "environments": [
        {"answer": {"violations": [], "missing": ["x"], "notes": [], "tools": []}, "code": 0, "stderr": ""}
    ],
    "model": {"answer": None, "code": -9, "stderr": "x"},
}


@fuzzed()
@given(damaged(PROBED).map(lambda data: data.decode(errors="replace")))
def test_environment_probe_results(text: str) -> None:
    with bounded(len(text), factor=64), contextlib.suppress(DamagedError):
        found = probe_messages.decoded(text, probe_messages.ProbeResults)
        assert probe_messages.decoded(probe_messages.encoded(found), probe_messages.ProbeResults) == found


PARTS = {"node": "n0", "parts": {"python": "3.11.9", "cuda": None}}


@fuzzed()
@given(damaged(PARTS))
def test_node_inventories(data: bytes) -> None:
    with contextlib.suppress(ClusterError):
        assert set(_parse(data.decode(errors="replace"))) <= {str(PARTS["node"])} or data != lines(PARTS)
