"""A run directory that release 0.1.0 wrote is shown with the facts that that release showed, in today's words.

`tests/data/run_of_0_1_0` was left by an emulated run: an engine and a router were killed, a node was lost and replaced,
a rank of the trainer was killed, which ended the first attempt; the second one completed. `events_of_0_1_0.jsonl` has
every kind of event as that release wrote it. `shown_by_0_1_0` is what 0.1.0 showed; only its words have changed since.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from primeslurm.records.events import AnyEvent, decode
from primeslurm.records.fleet import AgentReport
from primeslurm.run.diagnosis.failures import failures
from primeslurm.run.status.event_text import notable
from tests.support.cli import primeslurm

DATA = Path(__file__).resolve().parents[2] / "data"
SHOWN = DATA / "shown_by_0_1_0"
EVALUATION = (f"evaluation_{what}" for what in ("started", "done", "skipped", "sample_failed"))
NEW_KINDS = frozenset(
    {
        *("continued", "engine_silent", "environment_fails", "file_system_fault", "hangs", "loop_stood_still"),
        *("checkpoint_damaged", "engine_answers_damaged", "moved", "nothing_kept", "storage_fault", "task_given_up"),
        *("port_taken", "ranks_wait", "router_complete", "router_incomplete", "router_restarted", "step_skipped"),
        *EVALUATION,
    }
)
"""Kinds of events that came after 0.1.0."""
COMMANDS = {
    "status.txt": ("status", "small-1"),
    "status.json": ("status", "small-1", "--processes", "--json"),
    "summary.txt": ("summary", "small-1"),
    "summary.json": ("summary", "small-1", "--json"),
    "doctor.txt": ("doctor", "small-1", "--attempt", "1"),
    "doctor.json": ("doctor", "small-1", "--attempt", "1", "--json"),
    "doctor_2.json": ("doctor", "small-1", "--json"),
    "runs.txt": ("runs",),
    "runs.json": ("runs", "--json"),
    "report.html": ("report", "small-1", "--output", "report.html"),
}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A copy of the run below ./runs."""
    with tempfile.TemporaryDirectory(prefix="old") as directory:
        shutil.copytree(DATA / "run_of_0_1_0", Path(directory) / "runs" / "small-1")
        yield Path(directory)


def shown(place: Path, name: str) -> str:
    """What a command prints, or the page that it writes, without what is of this moment and machine."""
    result = primeslurm(*COMMANDS[name], cwd=place)
    text = (place / "report.html").read_text() if name.endswith(".html") else result.out
    return re.sub(r"(?<=written )[-0-9]+ [:0-9]+", "NOW", text.replace(str(place), "/PLACE")) + result.err.replace(
        str(place), "/PLACE"
    )


def of_then(found: Any, then: Any) -> Any:
    """What is found, without fields that came later."""
    if isinstance(found, dict) and isinstance(then, dict):
        return {name: of_then(value, then[name]) for name, value in found.items() if name in then}
    if isinstance(found, list) and isinstance(then, list) and len(found) == len(then):
        return [of_then(*pair) for pair in zip(found, then, strict=True)]
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_it_is_shown_with_the_same_facts(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    found, then = shown(place, name), (SHOWN / name).read_text()
    if name.endswith(".json"):
        assert of_then(json.loads(found), json.loads(then)) == json.loads(then)
    else:
        assert found.rstrip() == then.rstrip()


def test_every_kind_of_event_is_read_with_all_its_fields() -> None:
    """And tells a person, and whoever looks for failures, what it told them then."""
    lines = (DATA / "events_of_0_1_0.jsonl").read_bytes().splitlines()
    found = [event for line in lines if (event := decode(line)) is not None]
    assert len(found) == len(lines)
    for line, event in zip(lines, found, strict=True):
        again = msgspec.to_builtins(event)
        kept = {name: again.get(name) for name in json.loads(line)}
        assert repr(kept) == repr(json.loads(line))  # one of them holds NaN, which is not equal to itself
    then = json.loads((SHOWN / "events.json").read_text())
    assert msgspec.to_builtins(notable(found)) == then["notable"]
    silent = AgentReport(2, "n002", "10.0.0.3", found[0].time - 1.5, agent_pid=1)
    assert msgspec.to_builtins(failures(found, [silent])) == then["failures"]


def test_all_kinds_of_this_release_are_among_them() -> None:
    """A kind that is not cannot be one that 0.1.0 wrote, or its sample is missing."""
    written = {json.loads(line)["kind"] for line in (DATA / "events_of_0_1_0.jsonl").read_text().splitlines()}
    known = {kind.__struct_config__.tag for kind in get_args(AnyEvent)}
    assert written == known - NEW_KINDS
