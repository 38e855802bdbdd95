"""Messages between trainer, orchestrator and environment workers: rollouts, batches, requests, spooled groups."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.orchestrator.rollouts import job_protocol
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Result
from primeslurm.orchestrator.rollouts.spool import SpooledGroup, open_group
from primeslurm.wire import decoding
from primeslurm.wire.batches import batch_files, inline_images
from primeslurm.wire.batches.batch import Batch, BatchInfo, Row
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo, TeacherPrompt, prefill_tag
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.link.messages import Answer, Request
from primeslurm.wire.stored import checksums
from tests.unit.fuzz.mutations import bounded, fuzzed, messages, texts, trees


def rollout(tokens: int = 6) -> Rollout:
    """Return a rollout with every optional field."""
    info = RolloutInfo("r", "g", "e", opened_version=3, reward=0.5, metrics={"exact": 1.0})
    info = msgspec.structs.replace(
        info, images=(ImageSpan("/x", 1, 3, "00"),), teacher_prompt=TeacherPrompt([1, 2], 2), agent="a"
    )
    mask = np.arange(tokens) > 2
    return Rollout(
        info,
        np.arange(tokens, dtype=np.int32),
        mask,
        np.full(tokens, -0.5, np.float32),
        np.where(mask, 3, -1).astype(np.int32),
        observed=~mask,
        routed_experts=np.zeros((tokens, 3, 2), np.uint8),
        ref_logprobs=np.zeros(tokens, np.float32),
    )


def batch() -> Batch:
    """Return a batch with two rows."""
    kinds = {"token_ids": np.int32, "positions": np.int32, "mask": np.bool_, "logprobs": np.float32}
    kinds |= {"advantages": np.float32, "temperatures": np.float32, "on_policy": np.bool_}
    row = Row(**{name: np.ones(4, kind) for name, kind in kinds.items()}, routed_experts=np.zeros((4, 3, 2), np.uint16))
    row = replace(row, positions=np.array([0, 1, 2, 0], np.int32))
    return Batch(BatchInfo(1, 0, 1, 8), [row, replace(row, images=(ImageSpan("/x", 1, 3),))])


ROLLOUT = [bytes(part) for part in rollout().encode()]
BATCH = [bytes(part) for part in batch().encode()]
GROUP = RolloutGroup("e-0", "e", 0, 3, ((rollout(),), (rollout(), rollout(9)))).to_bytes()
RESULT = [bytes(part) for part in job_protocol.encode_result("j", (rollout(), rollout(9)))]
INLINE = "data:image/png;base64,aGVsbG8gd29ybGQ="
WORDS = [
    *(
        {"type": "GetBatch", "step": 1, "dp_rank": 0, "dp_world": 1, "cp_world": 1, "offset": 0},
        {"type": "Published", "version": 1, "path": "/x"},
    ),
    *({"type": "StepDone", "step": 1, "metrics": {"loss": 0.5}}, {"type": "Save", "step": 1, "directory": "/x"}),
    {"type": "OfferTransfer", "version": 1, "store": "h:1", "senders": 1, "done": ""},
    {"type": "SessionState", "session": "s", "rank": 0},
    {"type": "Status", "environment": "e", "worker": 0, "incarnation": "1", "jobs": ["j"], "tasks": 3, "node": "0"},
    {"type": "Status", "environment": "e", "worker": 0, "incarnation": "1", "jobs": [], "held": {"j": 9}},
    {"type": "Unusable", "environment": "e", "worker": 0, "error": "x"},
    {"type": "Ended", "job": "j", "size": 9},
    {"type": "Result", "job": "j", "frames": [6, 6], "error": None},
    *({"type": kind, "jobs": ["j"]} for kind in ("Cancel", "Describe", "Send")),
    {"type": "Claims", "jobs": []},
    {"kind": "session", "session": {"id": "s", "senders": 1, "size": 2}, "version": 1, "keep": [1]},
]


def is_a_rollout(found: Rollout) -> None:
    n = len(found.token_ids)
    assert n and found.token_ids.min() >= 0 and found.token_ids.dtype == np.int32
    assert found.mask.shape == found.logprobs.shape == found.versions.shape == (n,)
    assert np.isfinite(found.logprobs).all() and np.isfinite(np.float32(found.info.reward))
    assert (
        found.versions.min() >= prefill_tag(999_999_999)
        and found.mask.dtype == np.bool_
        and found.mask.view(np.uint8).max() <= 1
    )
    if found.routed_experts is not None:
        assert found.routed_experts.ndim == 3 and len(found.routed_experts) == n
    _ = (found.oldest_version, found.is_mixed)


def sizes(parts: list[bytes]) -> int:
    return sum(map(len, parts))


@st.composite
def restated(draw: st.DrawFn, valid: list[bytes]) -> list[bytes]:
    """Draw a message with a well-formed header that has other names, dtypes, shapes or values."""
    header = draw(trees(msgspec.msgpack.decode(valid[0])))
    if isinstance(header, dict) and draw(st.booleans()) and isinstance(header.get("arrays"), list):
        header["arrays"] = draw(trees(header["arrays"]))
    return [msgspec.msgpack.encode(header), *valid[1:]]


@fuzzed(2)
@given(messages(ROLLOUT) | restated(ROLLOUT))
def test_rollouts(parts: list[bytes]) -> None:
    with bounded(sizes(parts)):
        try:
            found = Rollout.decode(parts)
        except DamagedError:
            return
        is_a_rollout(found)


@fuzzed(1)
@given(messages(BATCH) | restated(BATCH))
def test_batches(parts: list[bytes]) -> None:
    with bounded(sizes(parts)):
        try:
            found = Batch.decode(parts)
        except DamagedError:
            return
        shapes = {row.token_ids.shape for row in found.rows} | {row.logprobs.shape for row in found.rows}
        assert len(shapes) == 1 and min(row.token_ids.min() for row in found.rows) >= 0


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches") / "rank"


@st.composite
def whole(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """Draw a file with correct checksums and any content."""
    frames = draw(messages(valid) | restated(valid)) or [b""]
    state = checksums.hasher()
    state.update(b"".join(frames))
    head = {"header": len(frames[0]), "arrays": sizes(frames[1:]), "digest": checksums.XXH3 + state.hexdigest()}
    encoded = msgspec.msgpack.encode(draw(st.just(head) | trees(head)))
    prefix = batch_files._PREFIX.pack(batch_files.MAGIC, len(encoded), zlib.crc32(encoded))
    return b"".join([prefix, encoded, *frames])


@fuzzed(1)
@given(whole(BATCH) | whole(BATCH).flatmap(texts))
def test_files_of_batches(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with bounded(len(data)):
        there = batch_files.is_there(file, whole=True)
        try:
            found = batch_files.read(file, lambda size: np.empty(size, np.uint8), 1 << 20)
        except DamagedError:
            return
    assert there and len({row.token_ids.shape for row in found.rows}) == 1


@fuzzed()
@given(texts(GROUP))
def test_spooled_groups(data: bytes) -> None:
    with bounded(len(data)):
        try:
            found = RolloutGroup.from_bytes(data)
        except DamagedError:
            return
        for sequence in found.sequences:
            is_a_rollout(sequence)
        assert len(found.rewards) == len(found.rollouts) > 0
        found.cut(4)


@fuzzed(2)
@given(texts(GROUP))
def test_group_files_whose_head_is_read_first(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "e-0.group"
    path.write_bytes(data)
    with bounded(len(data)):
        try:
            group = open_group(path)
            whole = group.whole()
        except DamagedError:
            return
        assert whole.size == group.size and whole.scored == group.scored
        if isinstance(group, SpooledGroup):
            slim, stored = group.experts_apart()
            for sequence, mine, array in zip(whole.sequences, slim.sequences, stored, strict=True):
                experts = sequence.routed_experts
                assert mine.routed_experts is None and mine.info == sequence.info
                assert (array and array.content.read()) == (None if experts is None else experts.tobytes())


@fuzzed()
@given(texts(INLINE.encode()).map(lambda data: data.decode(errors="surrogateescape")))
def test_images_within_messages(source: str) -> None:
    told = source
    try:
        assert len(inline_images.decode(source)) <= len(source)
    except ValueError as error:
        told = str(error)
    assert told.startswith(source[:20])


@fuzzed()
@given(messages(RESULT))
def test_results_of_workers(parts: list[bytes]) -> None:
    with bounded(sizes(parts)):
        try:
            head = decoding.decode_msgpack(parts[0] if parts else b"", Result)
            found = job_protocol.decode_sequences(head, parts[1:])
        except DamagedError:
            return
        assert found
        for sequence in found:
            is_a_rollout(sequence)


@fuzzed(1)
@given(st.sampled_from(WORDS).flatmap(lambda word: trees(word).map(msgspec.msgpack.encode).flatmap(maybe_cut)))
def test_requests_responses_and_worker_messages(data: bytes) -> None:
    for kind in (Request, Answer, job_protocol.ToOrchestrator, job_protocol.ToWorker):
        with bounded(len(data)):
            try:
                decoding.decode_msgpack(data, kind)  # type: ignore[arg-type]  # a union is no type
            except DamagedError:
                continue


def maybe_cut(data: bytes) -> st.SearchStrategy[bytes]:
    return st.just(data) | texts(data)


LYING = {
    "a shape of one axis that numpy would work out": ("<i4", [-1]),
    "2**40 bytes": ("<i4", [2**38]),
    "nothing, 2**60 times": ("<i4", [0, 2**60]),
    "an object": ("|O", [1]),
    "a structure": ("<f4,<f4", [3]),
    "a hundred axes": ("<i4", [1] * 100),
    "the other byte order": (">i4", [6]),
    "another type": ("<f4", [6]),
}


@pytest.mark.parametrize("lie", list(LYING.values()), ids=list(LYING))
def test_stated_array_sizes_are_not_trusted(lie: tuple[str, list[int]]) -> None:
    header: dict[str, Any] = msgspec.msgpack.decode(ROLLOUT[0])
    place = next(i for i, spec in enumerate(header["arrays"]) if spec["name"] == "token_ids")
    header["arrays"][place] |= {"dtype": lie[0], "shape": lie[1]}
    with pytest.raises(DamagedError):
        Rollout.decode([msgspec.msgpack.encode(header), *ROLLOUT[1:]])


def info(**changes: Any) -> list[bytes]:
    plain = rollout()
    return [bytes(part) for part in replace(plain, info=msgspec.structs.replace(plain.info, **changes)).encode()]


def array(**arrays: Any) -> list[bytes]:
    return [bytes(part) for part in replace(rollout(), **arrays).encode()]


NO_ROLLOUT = {
    "a reward that is no number": info(reward=float("nan")),
    "a reward without end": info(reward=float("inf")),
    "a reward that advantages cannot hold": info(reward=1e300),
    "a penalty that is no number": info(length_penalty=float("nan")),
    "a version below 0": info(opened_version=-1),
    "metrics without end": info(metrics={str(i): 0.0 for i in range(2000)}),
    "an image beyond its end": info(images=(ImageSpan("/x", 1, 7),)),
    "images over one another": info(images=(ImageSpan("/x", 1, 3), ImageSpan("/x", 2, 4))),
    "a teacher's prompt for more than there is": info(teacher_prompt=TeacherPrompt([1], 7)),
    "a token below 0": array(token_ids=np.array([0, 1, 2, 3, 4, -1], np.int32)),
    "tokens of 8 bytes": array(token_ids=np.arange(6)),
    "log-probabilities that are no numbers": array(logprobs=np.full(6, np.nan, np.float32)),
    "too few log-probabilities": array(logprobs=np.zeros(5, np.float32)),
    "routed experts of fewer tokens": array(routed_experts=np.zeros((5, 3, 2), np.uint8)),
    "routed experts without layers": array(routed_experts=np.zeros((6, 2), np.uint8)),
    "routed experts of 2,000 layers": array(routed_experts=np.zeros((6, 2000, 1), np.uint8)),
    "a version of a token below all tags": array(versions=np.full(6, -2 - 10**9, np.int32)),
    "no tokens": [bytes(part) for part in replace(rollout(0), info=rollout().info).encode()],
    "nothing": [],
}


@pytest.mark.parametrize("parts", list(NO_ROLLOUT.values()), ids=list(NO_ROLLOUT))
def test_untrainable_rollout_is_refused(parts: list[bytes]) -> None:
    assert Rollout.decode(ROLLOUT).info.reward == 0.5
    with pytest.raises(DamagedError):
        Rollout.decode(parts)


def test_large_models_and_long_rollouts_are_accepted() -> None:
    """GLM-5 with router replay: 131,072 tokens, 75 layers, 8 experts each. 79 MB."""
    tokens = 131_072
    plain = rollout(tokens)
    large = replace(plain, routed_experts=np.zeros((tokens, 75, 8), np.uint8))
    parts = job_protocol.encode_result("j", (large,))
    assert max(memoryview(part).nbytes for part in parts) < job_protocol.LARGEST_RESULT / 20
    result = decoding.decode_msgpack(parts[0], Result)
    # views of the received frames, and one pass over the tokens
    with bounded(sizes([bytes(parts[0])]), beside=16 << 20):
        (found,) = job_protocol.decode_sequences(result, parts[1:])
    assert found.routed_experts is not None and found.routed_experts.shape == (tokens, 75, 8)
