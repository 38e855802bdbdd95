"""Verbs that act on finished runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import typer

from primeslurm.api.runs.logs import Tail
from primeslurm.api.runs.run import Run
from primeslurm.api.submission import Submitted
from primeslurm.base.files import write_json
from primeslurm.cli.options import confirm
from primeslurm.cli.verbs import watch
from primeslurm.cli.verbs.submit import _announce
from primeslurm.cli.verbs.watch import watch_until_done
from primeslurm.plan.model import Process
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.records.events.training import StepTrained
from primeslurm.records.fleet import outcome_text
from primeslurm.run.directory import RunDirectory
from primeslurm.wire.stored import checkpoints
from tests.support.cli import primeslurm
from tests.support.plans import plan_of, python


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two finished local runs below ./runs."""
    for created, name in enumerate(("older", "newer")):
        process = Process(name="trainer-rank-0", role="trainer", node=0, argv=python("pass"), log="x")
        run = RunDirectory(tmp_path / "runs" / name)
        attempt = run.attempt(1)
        attempt.prepare(plan_of(run.path, (process,)))
        attempt.record_job(JobRecord("999999", "local", 1.0))
        attempt.record_end(EndRecord("completed", "all steps done", "", 4, False, "", 2.0))
        write_json(run.path / "lock.json", {"run_id": f"{name}-1", "created_at": float(created)})
        write_json(run.path / "recipe.resolved.json", {"max_steps": 4})
        rows = [{"step": i, "time": 1.0, "reward/mean": i / 4, "trainer/loss": 0.5} for i in range(1, 5)]
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for role, process_name in (("trainer", "trainer-rank-0"), ("router", "router-0")):
            log = attempt.path / "logs" / role / f"{process_name}.log"
            log.parent.mkdir(parents=True)
            log.write_text("first\nsecond\nthird\n")
    return tmp_path


def test_status_without_a_name_shows_the_newest_run(place: Path) -> None:
    result = primeslurm("status", cwd=place)
    assert result.code == 0, result.err
    assert result.out.startswith("newer  completed  attempt 1")
    assert "1.000" in result.out and "0.5000" in result.out


def test_status_as_json_is_the_whole_status(place: Path) -> None:
    status = json.loads(primeslurm("status", "older", "--json", cwd=place).out)
    assert (status["run_id"], status["phase"], status["reason"]) == ("older-1", "completed", "all steps done")
    assert status["metrics"]["step"] == 4


def test_watch_of_an_ended_run_returns_at_once(place: Path) -> None:
    result = primeslurm("status", "older", "--watch", cwd=place)
    assert result.code == 0
    assert result.err.splitlines()[-1] == "older: completed: all steps done"


def test_restarting_controller_neither_ends_a_watch_nor_allows_resume(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = place / "bin"
    answers.mkdir()
    waits = "JobId=5 Partition=gpu JobState=PENDING Reason=Resources Restarts=0 StartTime=Unknown ExitCode=0:0"
    says = (
        f"echo {waits}",
        "echo Unable to contact slurm controller >&2; exit 1",
        f"echo {waits}".replace("PENDING", "NODE_FAIL"),
    )
    for name, line in zip("123", says, strict=True):
        (answers / name).write_text(line)
    (answers / "scontrol").write_text(
        f"#!/bin/sh\ncd {answers}; [ -e 1 ] && mv 1 now || mv 2 now 2>&- || mv 3 now 2>&-; . ./now\n"
    )
    (answers / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(answers), prepend=":")
    run = RunDirectory(place / "runs" / "newer")
    (run.attempt(1).path / "end.json").unlink()
    run.attempt(1).record_job(JobRecord("5", "slurm", 1.0))
    assert watch_until_done(Run(run.path), poll_s=0.01) == 1
    assert not (answers / "3").exists(), "the watch ended before the job did"
    (answers / "3").write_text(says[1])
    result = primeslurm("resume", "newer", cwd=place)
    assert (result.code, run.latest().number) == (3, 1), result.err


def test_runs_lists_all_runs(place: Path) -> None:
    rows = json.loads(primeslurm("runs", "--json", cwd=place).out)
    assert [(row["run"], row["phase"]) for row in rows] == [("older", "completed"), ("newer", "completed")]
    lines = primeslurm("runs", cwd=place, columns=80).out.splitlines()
    assert [line.split() for line in lines] == [
        ["run", "phase", "attempt", "job", "step", "committed"],
        ["older", "completed", "1", "999999", "4/4", "-"],
        ["newer", "completed", "1", "999999", "4/4", "-"],
    ]
    assert "newer" in primeslurm("runs", cwd=place).out


def test_logs_of_a_role_a_process_or_all(place: Path) -> None:
    trainer = primeslurm("logs", "older", "trainer", "-n", "2", cwd=place)
    assert trainer.out == "trainer-rank-0 | second\ntrainer-rank-0 | third\n"
    assert primeslurm("logs", "older", "router-0", "-n", "1", "-f", cwd=place).out == "router-0 | third\n"
    assert primeslurm("logs", "older", "-n", "1", cwd=place).out == "router-0 | third\ntrainer-rank-0 | third\n"


def test_tail_follows_logs_that_grow_appear_and_vanish(tmp_path: Path) -> None:
    long, later = tmp_path / "long.log", tmp_path / "later.log"
    long.write_bytes(b"".join(b"%d\n" % i for i in range(50_000)) + b"hal")
    tail = Tail(lambda: sorted(tmp_path.glob("*.log")), 20_000)

    def texts(lines: Iterable[tuple[Path, str]]) -> list[str]:
        return [f"{path.stem} {line}" for path, line in lines]

    assert texts(tail.first()) == [f"long {i}" for i in range(30_001, 50_000)]
    with long.open("ab") as handle:
        handle.write(b"f\nthe next\nand")
    later.write_text("begins\n")
    assert texts(tail.more()) == ["later begins", "long half", "long the next"]
    later.unlink()
    later.symlink_to("nowhere")
    assert texts(tail.more()) == []
    assert texts(tail.more(ended=True)) == ["long and"]


def test_following_prints_last_lines_and_later_attempts(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(place / "runs" / "older")
    waits = 2

    def active(*_: object, **__: object) -> SimpleNamespace:
        nonlocal waits
        waits -= 1
        if waits == 0:
            run.attempt(2).prepare(run.latest().plan())
            new = run.attempt(2).path / "logs" / "trainer" / "trainer-rank-0.log"
            new.parent.mkdir(parents=True)
            new.write_text("Traceback\n")
        return SimpleNamespace(active=waits > 0)

    monkeypatch.setattr(Run, "status", active)
    monkeypatch.setattr(watch, "FOLLOW_S", 0.01)
    watch.logs("older", "trainer", place / "runs", follow=True, lines=1, attempt=None)
    assert capsys.readouterr().out == "trainer-rank-0 | third\ntrainer-rank-0 | Traceback\n"


def test_unknown_log_gets_a_suggestion(place: Path) -> None:
    result = primeslurm("logs", "older", "--attempt", "7", cwd=place)
    assert (result.code, result.err) == (2, "error: --attempt = 7: does not exist; the attempts are 1 (nearest: 1)\n")
    result = primeslurm("logs", "older", "trainers", cwd=place)
    assert result.code == 2 and result.err.startswith("error: PROCESS = trainers: ")
    assert result.err.endswith("(did you mean trainer?)\n")


def test_summary_shows_the_reward_gain(place: Path) -> None:
    result = primeslurm("summary", "older", cwd=place)
    assert "older: 4 steps" in result.out
    assert json.loads(primeslurm("summary", "older", "--json", cwd=place).out)["last_reward"] == 0.875


@pytest.mark.parametrize(
    ("trained", "saved", "flags", "said"),
    [
        (3, 2, (), ["the trainer ended before it wrote a last checkpoint: it had trained step 3", "from step 2"]),
        (3, 2, ("--now",), ["from step 2"]),
        (3, 3, (), ["from step 3"]),
        (1, 0, ("--now",), ["from the beginning"]),
    ],
)
def test_cancel_says_where_the_run_continues(
    trained: int, saved: int, flags: tuple[str, ...], said: list[str], place: Path
) -> None:
    attempt = RunDirectory(place / "runs" / "newer").attempt(1)
    (attempt.path / "end.json").unlink()
    events = attempt.path / "events" / "trainer-rank-0.jsonl"
    events.write_bytes(msgspec.json.encode(StepTrained(step=trained)) + b"\n")
    if saved:
        directory = checkpoints.step_dir(place / "runs" / "newer", saved)
        directory.mkdir(parents=True)
        checkpoints.commit(directory, saved, 1)
    result = primeslurm("cancel", "newer", "--yes", *flags, cwd=place)
    *reasons, last = said
    lines = [*reasons, f"newer is cancelled; continue {last} with: primeslurm resume newer"]
    assert (result.code, result.err.splitlines()) == (0, lines)


def test_ended_run_cannot_be_cancelled_or_resumed(place: Path) -> None:
    result = primeslurm("cancel", "older", cwd=place)
    assert (result.code, result.err) == (0, "older is completed: nothing to cancel\n")
    result = primeslurm("resume", "older", cwd=place)
    assert (result.code, result.err) == (2, "error: RUN = older: is completed: there is nothing to resume\n")


def test_damaged_run_is_named_and_hides_no_other(place: Path) -> None:
    run = place / "runs" / "older"
    (run / "attempts" / "1" / "fleet.json").write_text("[3]")
    (run / "attempts" / "1" / "end.json").write_bytes(b"\xff\xfe\x00")  # an undecodable file counts as missing
    message = f"{run} is damaged, or was made by another release (ValidationError: Expected `object`, got `array`)"
    result = primeslurm("status", "older", "--json", cwd=place)
    assert (result.code, result.err) == (4, f"error: {message}\n")
    assert json.loads(result.out) == {"error": message, "exit_code": 4, "violations": []}
    result = primeslurm("runs", "--json", cwd=place)
    assert (result.code, result.err) == (0, f"warning: {message}\n")
    assert [row["run"] for row in json.loads(result.out)] == ["newer"]
    (run / "lock.json").unlink()
    result = primeslurm("doctor", "older", cwd=place)
    assert (result.code, result.err) == (4, f"error: {place}/runs/older is damaged: it has no lock.json\n")


def test_impossible_file_name_is_no_run(place: Path) -> None:
    result = primeslurm("summary", "x" * 300, cwd=place)
    assert result.code == 4 and "there is no run xxx" in result.err


def test_json_has_null_for_nan_and_infinity(place: Path) -> None:
    with (place / "runs" / "older" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time": 2.0, "trainer/loss": NaN}\n')
    assert json.loads(primeslurm("status", "older", "--json", cwd=place).out)["metrics"]["trainer/loss"] is None


def test_missing_runs_exit_with_4(tmp_path: Path) -> None:
    result = primeslurm("status", cwd=tmp_path)
    assert (result.code, result.err) == (
        4,
        f"error: there is no run in {tmp_path}/runs (primeslurm submit starts one)\n",
    )


@pytest.mark.parametrize("continues", [True, False])
def test_interrupted_wait_prints_how_to_cancel(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], continues: bool
) -> None:
    def interrupted(run: Run) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "watch_until_done", interrupted)
    plan = RunDirectory(place / "runs" / "newer").attempt(1).plan()
    with pytest.raises(KeyboardInterrupt):
        _announce(Submitted(plan, 1, "5"), wait=True, as_json=False, continues=continues)
    said = f"newer continues; to end it with a last checkpoint: primeslurm cancel {plan.run_dir}"
    assert (said in capsys.readouterr().err.replace("\n", " ")) is continues


@pytest.mark.parametrize(
    ("executor", "in_step", "warned"), [("local", True, 1), ("local", False, 0), ("slurm", True, 0)]
)
def test_local_run_in_a_slurm_step_gets_a_warning(
    executor: str,
    in_step: bool,
    warned: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    if in_step:
        monkeypatch.setenv("SLURMD_NODENAME", "n1")
    plan = plan_of(tmp_path / "run", ()).model_copy(update={"executor": executor})
    _announce(Submitted(plan, 1, "5"), wait=False, as_json=False)
    assert capsys.readouterr().err.count("Slurm ends this run together with the step") == warned


def test_verbs_print_json(place: Path) -> None:
    cancelled = primeslurm("cancel", "older", "--yes", "--json", cwd=place)
    assert json.loads(cancelled.out) == {"run": "older", "cancelled": False, "phase": "completed"}
    logs = primeslurm("logs", "older", "trainer", "-n", "1", "--json", cwd=place)
    assert json.loads(logs.out) == {"process": "trainer-rank-0", "line": "third"}
    report = primeslurm("report", "older", "-o", "page.html", "--json", cwd=place)
    assert json.loads(report.out) == {"file": "page.html"} and (place / "page.html").exists()
    nodes = primeslurm("nodes", "--forget", "--all", "--yes", "--json", cwd=place)
    assert json.loads(nodes.out) == []


@pytest.mark.parametrize(
    ("terminal", "yes", "asked"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_only_terminals_are_asked_for_confirmation(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, yes: bool, asked: bool
) -> None:
    questions: list[str] = []
    monkeypatch.setattr(typer, "confirm", lambda question, **_: questions.append(question))
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(sys, stream, SimpleNamespace(isatty=lambda: terminal))
    confirm("Stop it?", yes)
    assert questions == (["Stop it?"] if asked else [])


@pytest.mark.parametrize(
    ("outcome", "reason", "text"),
    [
        ("preempted", "preempted: Slurm cancels the job", "preempted: Slurm cancels the job"),
        ("preempted", "Slurm requeued the job", "preempted: Slurm requeued the job"),
        ("cancelled", "cancelled by the user", "cancelled by the user"),
        ("running", "", "running"),
    ],
)
def test_outcome_is_printed_once(outcome: str, reason: str, text: str) -> None:
    assert outcome_text(outcome, reason) == text


OF_A_RUN: dict[str, tuple[str, ...]] = {
    "status": (),
    "logs": (),
    "summary": (),
    "doctor": (),
    "cancel": (),
    "resume": (),
    "report": (),
    "eval": (),
    "diff": ("newer",),
    "attach": ("trainer",),
    "export": ("model",),
}
"""Verbs that take a run, and their other required arguments."""


@pytest.mark.parametrize("verb", ["status", "eval", "export"])
def test_run_without_a_lock_file_exits_with_4(place: Path, verb: str) -> None:
    (place / "runs" / "older" / "lock.json").unlink()
    result = primeslurm(verb, "older", *OF_A_RUN[verb], cwd=place)
    assert (result.code, result.err) == (4, f"error: {place}/runs/older is damaged: it has no lock.json\n")


@pytest.mark.parametrize("verb", ["status", "doctor", "cancel", "resume", "report", "diff", "attach"])
def test_damaged_plan_exits_with_4(place: Path, verb: str) -> None:
    for plan in (place / "runs" / "older").rglob("plan.json"):
        plan.write_text("{")
    result = primeslurm(verb, "older", *OF_A_RUN[verb], cwd=place)
    assert result.code == 4 and result.err.startswith("error: ") and "plan.json" in result.err


def test_run_is_found_in_the_default_directory_despite_a_site_file(place: Path) -> None:
    (place / "site.yaml").write_text("name: elsewhere\nruns: elsewhere\nnodes: {default: {partition: gpu, cpus: 8}}\n")
    result = primeslurm("status", "older", cwd=place)
    assert result.code == 0 and "older" in result.out, result.err


@pytest.mark.parametrize("verb", OF_A_RUN)
def test_unknown_run_exits_with_4_and_a_suggestion(place: Path, verb: str) -> None:
    result = primeslurm(verb, "oldr", *OF_A_RUN[verb], cwd=place)
    assert (result.code, result.err) == (4, f"error: there is no run oldr in {place}/runs (did you mean older?)\n")
