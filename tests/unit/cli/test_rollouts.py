"""`primeslurm rollouts`: lists, filters, shows and exports rollouts. Hostile texts reach no terminal as they are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from pyarrow import parquet

from primeslurm.api.runs.run import Run
from primeslurm.base.files import write_json
from primeslurm.cli.verbs import rollouts as verb
from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.orchestrator.rollouts.transcripts import Credited, Transcript
from primeslurm.records import rollout_files
from primeslurm.records.rollout_files import FileName, StoredRollout
from primeslurm.records.rollouts import Message, RolloutSummary, RolloutTranscript, ToolCall
from primeslurm.run.rollouts.query import RolloutQuery
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.cli import Result, primeslurm
from tests.unit.run.test_rollout_archive import LENGTHS, MESSAGES, rollout, write

# A terminal obeys ESC and C1 controls; marks of direction change what is read; rich reads brackets as markup.
HOSTILE = "\x1b[31mred\x1b]0;title\x07 \x9b2J \r\b\x00 \u202eabc [bold]no markup[/bold] <script>alert(1)</script>"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def keep(run: Path, *kept: tuple[RolloutSummary, StoredRollout], step: int = 1) -> None:
    path = run / rollout_files.DIRECTORY / str(FileName(step, 1, "batch", 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(rollout_files.encode(kept)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory that holds nothing but its lock."""
    directory = tmp_path / "runs" / "mine"
    directory.mkdir(parents=True)
    write_json(directory / "lock.json", {"run_id": "mine-1", "created_at": 1.0})
    return directory


Command = Callable[..., Result]


@pytest.fixture
def rollouts_of(run: Path) -> Command:
    """Run `primeslurm rollouts mine WORDS`."""
    return lambda *words: primeslurm("rollouts", "mine", *words, cwd=run.parents[1])


def test_list_shows_the_newest_rollouts_first(run: Path, rollouts_of: Command) -> None:
    write(run, 3, range(2))
    write(run, 4, range(60))
    result = rollouts_of()
    assert result.code == 0, result.err
    heading, first, *others = result.out.splitlines()
    assert heading.split() == ["rollout", "step", "reward", "advantage", "tokens", "turns", "versions", "time", "state"]
    assert first.split() == ["e-00000004/59-abc59", "4", "5.9", "+0.250", "8", "2", "4-5", "0", "s", "trained"]
    assert len(others) == 49 and result.err == "50 of 62 rollouts; --limit shows more\n"


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (("--step", ":3", "--reward", "0.1:"), ["3/1"]),
        (("--reward", ":0.05", "--limit", "1"), ["4/0"]),
        (("--step", "3", "--group", "e-00000003", "--version", "5"), ["3/1", "3/0"]),
        (("--step", "4:", "--evaluation"), ["4/0"]),
        (("--environment", "other", "--failed", "--dropped", "--truncated"), []),
    ],
)
def test_filters(words: tuple[str, ...], ids: list[str], run: Path, rollouts_of: Command) -> None:
    write(run, 3, range(2))
    write(run, 4, range(1), kind="evaluation")
    result = rollouts_of(*words, "--json")
    assert result.code == 0, result.err
    assert [each["id"][9:].partition("-")[0] for each in json.loads(result.out)] == ids


def test_one_rollout_is_shown_whole(run: Path, rollouts_of: Command) -> None:
    write(run, 6, range(3))
    result = rollouts_of("2-abc2")
    assert result.code == 0, result.err
    for text in (
        "e-00000006/2-abc2",
        "reward: 0.2 = right 0.2",
        "advantage: +0.2500",
        "policy versions: 4-5, group opened at 4, staleness 1",
        "tokens: 8, of these 3 sampled and 3 trained",
        "user  2 tokens",
        "How many?",
        "assistant, turn 1  3 tokens  version 4",
        "Count.",
        '-> sh {"command": "wc"}',
        "tool sh  2 tokens",
        "assistant, turn 2  at 1 s, took 0.5 s  1 token  version 5  log-probability -0.5000  trainer unknown  ",
    ):
        assert text in result.out, f"{text!r} is not in\n{result.out}"
    listed = rollouts_of("2-abc2", "--tokens").out
    assert re.search(r"^ +7 +107 +yes +5 +-0\.5000 +0\.2500 +'<7>'$", listed, re.MULTILINE), listed


def test_dropped_and_failed_rollouts_say_why(run: Path, rollouts_of: Command) -> None:
    dropped = transcripts.stored([rollout(1)], {"state": "dropped", "step": 1, "dropped": "repetition"})
    error = "ValueError: it broke\n  in line 3"
    failed = RolloutSummary(id="e-00000009/0-x", group="g", environment="e", state="failed", step=1, error=error)
    keep(run, dropped, (failed, StoredRollout()))
    listed = rollouts_of().out
    assert "dropped: repetition" in listed and "failed: ValueError: it broke in line 3" in listed
    assert "dropped: repetition" in rollouts_of("1-abc1").out
    assert "  in line 3" in rollouts_of("e-00000009").out


def hostile(message: str) -> tuple[RolloutSummary, StoredRollout]:
    """Return a rollout in which every text is hostile."""
    call = ToolCall(HOSTILE, HOSTILE, HOSTILE)
    messages = [
        Message(role=HOSTILE, content=message, name=HOSTILE),
        Message(role="assistant", content=HOSTILE, reasoning=HOSTILE, tool_calls=[call], sampled=True),
    ]
    pieces = dict.fromkeys(range(100, 108), HOSTILE)
    transcript = Transcript(messages, [4, 4], [[0, 1]], [HOSTILE], {HOSTILE: 1.0}, pieces)
    info = RolloutInfo(f"{HOSTILE}/0", HOSTILE, HOSTILE, 1, 1.0, {HOSTILE: 1.0}, agent=HOSTILE, finish_reason=HOSTILE)
    info = msgspec.structs.replace(info, transcript=transcripts.encode(transcript))
    versions = np.array([-1] * 4 + [1] * 4, np.int32)
    made = Rollout(info, np.arange(100, 108, dtype=np.int32), versions >= 0, np.zeros(8, np.float32), versions)
    credit = Credited(made.mask, np.ones(8, np.float32))
    return transcripts.stored([made], {"state": "dropped", "step": 1, "dropped": HOSTILE, "error": HOSTILE}, [credit])


@pytest.mark.parametrize("words", [(), ("red", "--tokens"), ("red", "--full"), ("red", "--json"), ("no\x1b[31m",)])
def test_hostile_texts_control_no_terminal(words: tuple[str, ...], run: Path, rollouts_of: Command) -> None:
    keep(run, hostile(HOSTILE))
    result = rollouts_of(*words)
    assert not CONTROLS.search(result.out) and not CONTROLS.search(result.err)
    if words[:1] == ("red",):
        assert result.code == 0, result.err
        assert "[bold]no markup[/bold] <script>" in result.out and "\\x1b[31mred" in result.out.replace(
            "\\u001b", "\\x1b"
        )


def test_long_lines_are_shortened_unless_the_user_wants_all(run: Path, rollouts_of: Command) -> None:
    keep(run, hostile("x" * 10_000_000))
    short, full = rollouts_of("red"), rollouts_of("red", "--full")
    assert len(short.out) < 50_000 and "--full shows them" in short.out
    assert "x" * 100_000 in full.out and "characters were not kept" in full.out


def test_damaged_file_is_a_warning(run: Path, rollouts_of: Command) -> None:
    write(run, 3, range(2))
    path = write(run, 4, range(2))
    path.write_bytes(path.read_bytes()[:50])
    result = rollouts_of()
    assert result.code == 0 and len(result.out.splitlines()) == 3
    assert result.err.startswith("warning: 00000004-001-batch-0000.rollouts: ")


def test_run_without_rollouts_says_so(rollouts_of: Command) -> None:
    result = rollouts_of()
    assert (result.code, result.out) == (0, "") and "no rollout of mine was kept" in result.err
    assert json.loads(rollouts_of("--json").out) == []
    missing = rollouts_of("nothing")
    assert missing.code == 4 and "no rollout 'nothing'" in missing.err


def test_every_mistake_is_one_problem(rollouts_of: Command) -> None:
    words = ("--step", "1" * 5000, "--reward", "nan:1", "--tokens", "--full", "--export", "x.csv", "--follow")
    result = rollouts_of(*words)
    assert result.code == 2 and result.err.startswith("error: 6 problems")
    for text in (
        *("--step = 1111", "--reward = nan:1: is no range", "--tokens: needs the ID", "--full: needs the ID"),
        *("--export = ", "--follow"),
    ):
        assert result.err.count(text) == 1, result.err
    assert "Traceback" not in result.err


def test_export_replaces_no_pipe(run: Path, rollouts_of: Command) -> None:
    write(run, 3, range(3))
    pipe = run.parents[1] / "pipe.parquet"
    os.mkfifo(pipe)
    result = rollouts_of("--export", str(pipe))
    assert result.code == 2 and "cannot be written: it is a device or a pipe, not a file" in result.err
    assert pipe.is_fifo()


def test_export_as_json_lines_is_complete(run: Path, rollouts_of: Command) -> None:
    write(run, 3, range(3))
    result = rollouts_of("--reward", "0.1:", "--export", "kept.jsonl")
    assert (result.code, result.out) == (0, "kept.jsonl\n"), result.err
    lines = (run.parents[1] / "kept.jsonl").read_bytes().splitlines()
    first, second = (msgspec.json.decode(line, type=RolloutTranscript) for line in lines)
    assert (first.summary.reward, second.summary.reward) == (0.2, 0.1)
    assert first.conversations[0].messages == MESSAGES


def test_export_as_parquet_has_the_same_columns_for_all_rollouts(run: Path, rollouts_of: Command) -> None:
    write(run, 3, range(3))
    keep(run, hostile(HOSTILE), (RolloutSummary(id="x", group="g", environment="e", state="failed"), StoredRollout()))
    result = rollouts_of("--export", "kept.parquet", "--json")
    assert json.loads(result.out) == {"file": "kept.parquet", "rollouts": 5}, result.err
    table = parquet.read_table(run.parents[1] / "kept.parquet").to_pylist()
    assert [row["reward"] for row in table] == [0.2, 0.1, 0.0, None, 1.0]
    (conversation,) = table[0]["conversations"]
    assert [message["content"] for message in conversation["messages"]] == [message.content for message in MESSAGES]
    (sequence,) = conversation["sequences"]
    assert sequence["token_ids"] == list(range(100, 108)) and sequence["versions"][-1] == 5
    assert dict(table[0]["reward_parts"]) == {"right": 0.2}
    names = set(RolloutSummary.__struct_fields__) | {"conversations"}
    assert set(table[0]) == names and len(sequence["pieces"]) == sum(LENGTHS)
    only = rollouts_of("2-abc2", "--export", "one.parquet", "--json")
    assert json.loads(only.out)["rollouts"] == 1


def test_export_to_a_missing_directory_is_a_usage_error(run: Path, rollouts_of: Command) -> None:
    write(run, 3, range(1))
    for name in ("nowhere/kept.jsonl", "nowhere/kept.parquet"):
        result = rollouts_of("--export", name)
        assert result.code == 2 and "--export = nowhere" in result.err


def test_follow_prints_each_rollout_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, 1, range(2))
    steps = iter([2, 3])
    monkeypatch.setattr(verb.time, "sleep", lambda seconds: write(run, next(steps), range(1)))
    looks = iter([True, True, False])
    monkeypatch.setattr(Run, "status", lambda run, if_silent: SimpleNamespace(active=next(looks)))
    verb._follow(Run(run), RolloutQuery(), 50, as_json=True)
    ids = [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]
    assert ids == ["e-00000001/0-abc0", "e-00000001/1-abc1", "e-00000002/0-abc0", "e-00000003/0-abc0"]
