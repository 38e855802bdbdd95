"""A run directory that release 0.1.0 wrote is shown as that release showed it.

`tests/data/run_of_0_1_0` was left by an emulated run: an engine and a router were killed, a node was lost and replaced, a
trainer's rank was killed, which ended the first attempt; the second one completed. `shown_by_0_1_0` is what 0.1.0 printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import primeslurm

DATA = Path(__file__).resolve().parents[1] / "data"
SHOWN = DATA / "shown_by_0_1_0"
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
    """A copy of the run below ./runs, in a directory whose name is always as long: tables are as wide as their words."""
    with tempfile.TemporaryDirectory(prefix="old", dir="/tmp") as directory:
        shutil.copytree(DATA / "run_of_0_1_0", Path(directory) / "runs" / "small-1")
        yield Path(directory)


def shown(place: Path, name: str) -> str:
    """What a command prints, or the page that it writes, without what is of this moment and machine."""
    result = primeslurm(*COMMANDS[name], cwd=place)
    text = (place / "report.html").read_text() if name.endswith(".html") else result.out
    return re.sub(r"(?<=written )[-0-9]+ [:0-9]+", "NOW", text.replace(str(place), "/PLACE")) + result.err.replace(
        str(place), "/PLACE"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_it_is_shown_as_it_was_shown_then(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    found, then = shown(place, name), (SHOWN / name).read_text()
    if name.endswith(".json"):
        assert json.loads(found) == json.loads(then)
    else:
        assert found == then


if __name__ == "__main__":  # with the code of 0.1.0 on the path
    os.environ["TZ"] = "UTC"
    with tempfile.TemporaryDirectory(prefix="old", dir="/tmp") as there:
        shutil.copytree(DATA / "run_of_0_1_0", Path(there) / "runs" / "small-1")
        for each in COMMANDS:
            (SHOWN / each).write_text(shown(Path(there), each))
