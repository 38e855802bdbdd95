"""The archive of rollouts: what was written is read again, and damaged or vanished files cost only themselves."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from primeslurm.base.errors import RunError
from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.orchestrator.rollouts.transcripts import Credited, Transcript
from primeslurm.records import rollout_files
from primeslurm.records.events.training import CheckpointLoaded, StepTrained
from primeslurm.records.rollout_files import FileName
from primeslurm.records.rollouts import Message, MessageSpan, RolloutSummary, ToolCall
from primeslurm.run.rollouts.archive import RolloutArchive
from primeslurm.run.rollouts.query import RolloutQuery
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo

MESSAGES = [
    Message(role="user", content="How many?"),
    Message(role="assistant", reasoning="Count.", tool_calls=[ToolCall("1", "sh", '{"command": "wc"}')], sampled=True),
    Message(role="tool", content="3", tool_call_id="1", name="sh"),
    Message(role="assistant", content="3", sampled=True, started_s=1.0, ended_s=1.5),
]
LENGTHS = [2, 3, 2, 1]


def rollout(number: int, reward: float = 1.0, group: str = "e-00000000", finish: str = "stop") -> Rollout:
    """Return one sequence with a transcript, whose tokens are 100, 101, ..."""
    pieces = {100 + i: f"<{i}>" for i in range(sum(LENGTHS))}
    transcript = Transcript(MESSAGES, LENGTHS, [[0, 1, 2, 3]], ["sh"], {"right": reward}, pieces)
    info = RolloutInfo(
        f"{group}/{number}-abc{number}",
        group,
        "e",
        4,
        reward,
        metrics={"commands": 1.0},
        turns=2,
        finish_reason=finish,
        agent="agent",
        transcript=transcripts.encode(transcript),
    )
    versions = np.array([-1, -1, -1, 4, 4, -1, -1, 5], np.int32)
    logprobs = np.where(versions >= 0, -0.5, 0.0).astype(np.float32)
    return Rollout(info, np.arange(100, 108, dtype=np.int32), versions >= 0, logprobs, versions)


def write(run: Path, step: int, numbers: range, kind: str = "batch") -> Path:
    """Write a file of the archive with one rollout per number, and return its path."""
    credit = Credited(rollout(0).mask, np.full(8, 0.25, np.float32))
    facts = {"state": "trained" if kind == "batch" else "evaluated", "step": step, "evaluation": kind != "batch"}
    facts["attempt"] = 1
    stored = [transcripts.stored([rollout(n, n / 10, f"e-{step:08d}")], facts, [credit]) for n in numbers]
    path = run / rollout_files.DIRECTORY / str(FileName(step, 1, kind, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(rollout_files.encode(stored)))
    return path


def test_archived_rollout_is_read_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, 6, range(3))
    shown = RolloutArchive(tmp_path).get("e-00000006/2-abc2")
    assert shown.summary == RolloutSummary(
        id="e-00000006/2-abc2",
        group="e-00000006",
        environment="e",
        state="trained",
        step=6,
        attempt=1,
        agents=["agent"],
        reward=0.2,
        reward_parts={"right": 0.2},
        metrics={"commands": 1.0},
        advantage=0.25,
        opened_version=4,
        oldest_version=4,
        newest_version=5,
        staleness=1,
        tokens=8,
        sampled_tokens=3,
        trained_tokens=3,
        turns=2,
        time=shown.summary.time,
        finish_reason="stop",
    )
    (conversation,) = shown.conversations
    assert conversation.messages == MESSAGES and conversation.tools == ["sh"]
    (sequence,) = conversation.sequences
    assert sequence.spans == [MessageSpan(0, 0, 2), MessageSpan(1, 2, 5), MessageSpan(2, 5, 7), MessageSpan(3, 7, 8)]
    assert sequence.token_ids == list(range(100, 108)) and sequence.pieces[3] == "<3>"
    assert sequence.versions == [None, None, None, 4, 4, None, None, 5]
    assert sequence.sampled == sequence.trained == [version is not None for version in sequence.versions]
    assert sequence.logprobs == [None if version is None else -0.5 for version in sequence.versions]
    assert sequence.advantages == [None if version is None else 0.25 for version in sequence.versions]
    assert sequence.trainer_logprobs is None and sequence.ref_logprobs is None


def test_log_probabilities_of_all_trainer_ranks_are_shown(tmp_path: Path) -> None:
    """Two ranks may share a sequence. They write after the step, so the values are unknown before."""
    made, facts = rollout(2), {"state": "trained", "step": 6}
    stored = transcripts.stored([made], facts, [Credited(made.mask, np.ones(8, np.float32), number=5)])
    path = tmp_path / rollout_files.DIRECTORY / str(FileName(6, 1, "batch", 0))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(rollout_files.encode([stored])))
    archive = RolloutArchive(tmp_path)

    def shown() -> list[float | None] | None:
        return archive.get("abc2").conversations[0].sequences[0].trainer_logprobs

    assert shown() is None
    values = {0: [(5, [3, 4], [-0.5, -0.25])], 1: [(5, [7], [-1.0]), (4, [0], [-9.0])]}
    for rank, of_rank in values.items():
        rollout_files.logprobs_path(tmp_path, 6, 1, rank).write_bytes(rollout_files.encode_logprobs(of_rank))
    rollout_files.logprobs_path(tmp_path, 6, 2, 0).write_bytes(rollout_files.encode_logprobs([(5, [3], [-7.0])]))
    rollout_files.logprobs_path(tmp_path, 7, 1, 0).write_bytes(rollout_files.encode_logprobs([(5, [3], [-7.0])]))
    assert shown() == [None, None, None, -0.5, -0.25, None, None, -1.0]


def test_batch_of_an_untrained_step_is_batched(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step, range(1))
    archive, journal = RolloutArchive(tmp_path), tmp_path / "attempts" / "1" / "events" / "trainer-rank-0.jsonl"

    def states() -> list[str]:
        page = archive.page()
        assert [archive.get(each.id).summary for each in page.rollouts] == page.rollouts
        assert [each.summary for each in archive.transcripts()] == page.rollouts
        assert RolloutArchive(tmp_path).fresh() == page.rollouts[::-1]
        return [each.state for each in page.rollouts]

    assert states() == ["trained", "trained"], "nothing says what was trained"
    journal.parent.mkdir(parents=True)
    assert states() == ["batched", "batched"]
    events = (CheckpointLoaded(step=0), StepTrained(step=1, time=1.0))
    journal.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    assert states() == ["batched", "trained"]


def test_pages_follow_the_steps(tmp_path: Path) -> None:
    for step in (12, 2, 7):
        write(tmp_path, step, range(4))
    archive = RolloutArchive(tmp_path)
    newest = archive.page(limit=5)
    assert newest.total == 12 and [each.step for each in newest.rollouts] == [12] * 4 + [7]
    rest = archive.page(offset=5, limit=None)
    oldest = archive.page(limit=None, newest=False)
    assert [each.id for each in [*newest.rollouts, *rest.rollouts]] == [each.id for each in reversed(oldest.rollouts)]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        (RolloutQuery(steps=(2, 3)), ["e-00000003/0-abc0", "e-00000002/1-abc1", "e-00000002/0-abc0"]),
        (RolloutQuery(min_reward=0.1), ["e-00000002/1-abc1"]),
        (RolloutQuery(max_reward=0.0, evaluation=True), ["e-00000003/0-abc0"]),
        (RolloutQuery(group="e-00000002", version=4, max_reward=0.05), ["e-00000002/0-abc0"]),
        (RolloutQuery(version=6), []),
        (RolloutQuery(environment="other"), []),
        (RolloutQuery(failed=True), []),
        (RolloutQuery(truncated=False, dropped=False, min_reward=-math.inf, steps=(3, 3)), ["e-00000003/0-abc0"]),
    ],
)
def test_query_admits(query: RolloutQuery, ids: list[str], tmp_path: Path) -> None:
    write(tmp_path, 2, range(2))
    write(tmp_path, 3, range(1), kind="evaluation")
    page = RolloutArchive(tmp_path).page(query)
    assert [each.id for each in page.rollouts] == ids and page.total == len(ids)


def test_part_of_an_id_is_enough_if_no_other_rollout_has_it(tmp_path: Path) -> None:
    write(tmp_path, 2, range(2))
    archive = RolloutArchive(tmp_path)
    assert archive.get("abc1").summary.id == "e-00000002/1-abc1"
    with pytest.raises(RunError, match=r"2 rollouts .* have 'abc' in their id"):
        archive.get("abc")
    with pytest.raises(RunError, match="no rollout 'never'"):
        archive.get("never")


def test_damaged_file_hides_only_its_own_rollouts(tmp_path: Path) -> None:
    write(tmp_path, 1, range(2))
    path = write(tmp_path, 2, range(2))
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        archive = RolloutArchive(tmp_path)
        page = archive.page(limit=None)
        assert page.total in (2, 4) and bool(page.problems) == (page.total == 2)
        if page.total == 4:
            with pytest.raises(RunError, match="cannot be read"):
                archive.get("e-00000002/1-abc1")
        assert archive.get("e-00000001/0-abc0").conversations[0].messages == MESSAGES
    for index in range(0, len(whole), 11):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0x5A]) + whole[index + 1 :])
        archive = RolloutArchive(tmp_path)
        if archive.page(limit=None).total == 4:
            for number in range(2):
                try:
                    shown = archive.get(f"e-00000002/{number}-abc{number}")
                except RunError:
                    continue
                assert shown.conversations[0].messages == MESSAGES


def test_other_files_in_the_directory_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, 1, range(2))
    (path.parent / ".00000001-001-batch-0000.rollouts.tmp").write_bytes(b"half")
    (path.parent / "notes.txt").write_text("mine")
    page = RolloutArchive(tmp_path).page()
    assert page.total == 2 and page.problems == []


def test_removed_file_is_forgotten(tmp_path: Path) -> None:
    path = write(tmp_path, 1, range(2))
    write(tmp_path, 2, range(2))
    archive = RolloutArchive(tmp_path)
    assert archive.page().total == 4
    path.unlink()
    page = archive.page()
    assert page.total == 2 and page.problems == []


def test_run_without_rollouts_has_an_empty_list(tmp_path: Path) -> None:
    assert RolloutArchive(tmp_path / "missing").page().rollouts == []


def test_long_texts_lose_their_middle() -> None:
    long = Message(role="tool", content="a" * 5_000_000 + "end", tool_call_id="1")
    calls = [ToolCall("1", "sh", "b" * 6_000_000)]
    sampled = Message(role="assistant", reasoning="c" * 3_000_000, tool_calls=calls)
    decoded = transcripts.decode(transcripts.encode(Transcript([long, sampled], [1, 1], [[0, 1]])))
    assert decoded is not None
    first, second = decoded.messages
    assert first.content.startswith("aaa") and first.content.endswith("end") and "[...]" in first.content
    assert first.omitted + transcripts.LONGEST_TEXT == len(long.content)
    assert second.omitted == 9_000_000 - 2 * transcripts.LONGEST_TEXT


def test_huge_conversation_is_bounded() -> None:
    many = [Message(role="tool", content="x" * 5000) for _ in range(9000)]
    data = transcripts.encode(Transcript(many, [1] * 9000, [list(range(9000))]))
    decoded = transcripts.decode(data)
    assert decoded is not None and len(decoded.messages) == 9000
    assert all(message.omitted for message in decoded.messages)
    more = many * 2
    assert transcripts.encode(Transcript(more, [1] * 18000, [])) == b""
