"""Every file that the dashboard, `report` and `primeslurm rollouts` read, with every kind of damage."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from primeslurm.base.errors import PrimeslurmError, RunError
from primeslurm.base.files import write_json
from primeslurm.cli import app
from primeslurm.cli.lazy_verbs import readable
from primeslurm.dashboard.report import report
from primeslurm.records.rollout_files import encode_logprobs, logprobs_path
from primeslurm.records.state import OrchestratorState, TrainerState
from primeslurm.run.directory import RunDirectory
from tests.support.recorded_runs import HOSTILE, T0, recorded_run, write_evaluations, write_rollouts

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
ESCAPES = f"\x1b[31m\x1b]0;title\x07\x9b2J\u202e\ud800{HOSTILE}"
PAGES = (
    *("status", "curves", "curves?other=1", "fleet", "events", "logs", "log?name=job"),
    *("log?name=trainer/trainer-rank-0", "plan", "processes/orchestrator", "recipe", "diff/s"),
    *("evaluations", "evaluations/20/held-out", "rollouts", "rollouts/0002-1"),
)
COMMANDS = ((), ("0002-1", "--tokens"), ("0002-1", "--full"))


def complete_run(path: Path) -> RunDirectory:
    """Write a run that has every file that is read."""
    run = recorded_run(path)
    write_evaluations(run)
    write_rollouts(run)
    logprobs = logprobs_path(path, 2, 2, 0)
    logprobs.write_bytes(encode_logprobs([(0, [1], [-0.5])]))
    (path / "slurm-8.out").write_text("srun: ok\n")
    state = run.attempt(2).path / "state"
    state.mkdir(exist_ok=True)
    write_json(state / "orchestrator.json", msgspec.to_builtins(OrchestratorState(version=6, step=6)))
    write_json(state / "trainer-rank-0.json", msgspec.to_builtins(TrainerState(step=6)))
    return run


def replaced(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Return a function that replaces each value within JSON or JSON lines; other content becomes hostile text."""

    def walk(value: Any) -> Any:
        match value:
            case dict():
                return {key: walk(item) for key, item in value.items()}
            case list():
                return [walk(item) for item in value]
        return change(value)

    def damaged(data: bytes) -> bytes:
        for documents in ([data], data.splitlines()):
            with contextlib.suppress(ValueError):
                return b"".join(json.dumps(walk(json.loads(each))).encode() + b"\n" for each in documents)
        return ESCAPES.encode(errors="replace") + b"\n"

    return damaged


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[: len(data) // 2] + bytes(256) + data[len(data) // 2 :],
    "binary": lambda data: bytes(range(256)) * 10,
    "not UTF-8": lambda data: data.replace(b"a", b"\xff\xfe"),
    "long line": lambda data: b"x" * (10 << 20) + b"\n" + data,
    "huge JSON": lambda data: b'{"step": 31, "time": 1.0, "x": ["' + b"a" * (10 << 20) + b'"]}\n',
    "deep JSON": lambda data: b"[" * 100_000 + b"\n",
    "null": lambda data: b"null\n",
    "list": lambda data: b"[]\n",
    "object": lambda data: b"{}\n",
    "hostile texts": replaced(lambda value: ESCAPES if isinstance(value, str) else value),
    "texts for numbers": replaced(lambda value: ESCAPES),
    "huge numbers": replaced(lambda value: 10**400 if type(value) in (int, float) else value),
    "negative numbers": replaced(lambda value: -1e300 if type(value) in (int, float) else value),
    "not finite": replaced(lambda value: float("nan") if type(value) in (int, float) else value),
    "nulls": replaced(lambda value: None),
}
COMMON = ("half", "list", "hostile texts")
"""Damages of every commit. The others are variants of these."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_run(tmp_path_factory.mktemp("template") / "r").path


@pytest.fixture
def damaged(template: Path, runs: Path, client: TestClient) -> Callable[[str, Callable[[bytes], bytes]], Path]:
    """Create the run `r` with one damaged file."""

    def damage(name: str, change: Callable[[bytes], bytes]) -> Path:
        shutil.rmtree(runs / "r")
        shutil.copytree(template, runs / "r")
        path = runs / "r" / name
        path.write_bytes(change(path.read_bytes()))
        return runs / "r"

    return damage


def files_of(run: Path) -> list[str]:
    """Return files of a run. Each kind of reader reads at least one of them."""
    names = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    skipped = re.compile(r"attempts/1/|logs/(?!trainer)|agents/1|step-0000[01]0/s|0000000[13]-")
    return sorted(name for name in names if not skipped.search(name))


@pytest.mark.parametrize(
    "damage", [name if name in COMMON else pytest.param(name, marks=pytest.mark.campaign) for name in DAMAGES]
)
def test_damaged_file_breaks_no_page_and_no_command(
    damage: str, template: Path, damaged: Callable[..., Path], client: TestClient
) -> None:
    for name in files_of(template):
        run = damaged(name, DAMAGES[damage])
        for path in ("runs", *(f"runs/r/{page}" for page in PAGES)):
            answer = client.get(f"/api/{path}")
            assert answer.status_code in (200, 400, 404), f"{name}: {path}: {answer.status_code} {answer.text[:2000]}"
            assert answer.headers["content-type"] == "application/json", f"{name}: {path}"
            assert len(answer.content) < 1 << 20 or "log" not in path, f"{name}: {path}: {len(answer.content)}"
            answer.json()
        check_report(run, name)
        for words in COMMANDS if name == "lock.json" or name.startswith("rollouts/") else ():
            check_command(run, name, *words)


def check_report(run: Path, name: str) -> None:
    try:
        html = report(RunDirectory(run), lambda job: None, T0)
    except RunError:
        return
    assert HOSTILE not in html and "<img" not in html, name


def check_command(run: Path, name: str, *words: str) -> None:
    result = CliRunner().invoke(readable(app), ["rollouts", str(run), *words])
    assert result.exception is None or isinstance(result.exception, PrimeslurmError | SystemExit), (name, words)
    assert not CONTROLS.search(result.output), (name, words, result.output[:2000])
