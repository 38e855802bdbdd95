"""A room shows little at its top, and docs/architecture.md says what is where."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ROOT / "primeslurm"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = sorted(path.parent for path in ROOMS.rglob("__init__.py"))
MOST = 15
MANY = {
    "api": "one module for each thing that a command does",
    "families": "one module for each family",
    "trainer/models": "one module for each family",
    "recipe/sections": "one module for each section",
    ".": "the rooms, and the modules below all of them",
}
"""Packages that show more, and why."""


def entries(package: Path) -> list[str]:
    """What one sees there, but for what every package may have."""
    return [
        path.name
        for path in package.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
        if path.name not in ("__init__.py", "__main__.py")
    ]


def section(first: str, last: str) -> str:
    return PAGE[PAGE.index(first) : PAGE.index(last)]


def test_no_room_shows_more_than_one_can_take_in() -> None:
    crowded = {str(path.relative_to(ROOMS)) for path in PACKAGES if len(entries(path)) > MOST}
    assert crowded <= MANY.keys()
    assert len(PACKAGES) > 50


def test_every_room_is_in_the_table_of_rooms() -> None:
    named = set(re.findall(r"`([\w/]+)`", section("| room, wing |", "Where do I look for")))
    assert {path.name for path in PACKAGES if path.parent == ROOMS} <= named


def test_layers_are_those_that_imports_are_held_to() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    shown = re.search(r"^```\n(cli\n.*?)```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None and shown[1].splitlines() == layers
    named = set(re.findall(r"`([\w/]+)`", section("| room, wing |", "Where do I look for")))
    assert {name for layer in layers for name in layer.split(" | ")} <= named


OF_DATA = section("## The ways of data", "## Run directory")
WAYS = re.findall(r"^\| ([\w ,]+) \| (`[^|]+) \| (`[^|]+) \| ([^|]*) \|$", OF_DATA, re.MULTILINE)
FIGURES = dict(re.findall(r"^\| ([\w ,]+) \| (\d+, \d+, \d+) \|", OF_DATA, re.MULTILINE))


def modules(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


@pytest.mark.parametrize(("way", "before", "same", "since"), WAYS, ids=[way[0] for way in WAYS])
def test_a_way_of_data_is_one_of_modules_that_are_there(way: str, before: str, same: str, since: str) -> None:
    now = [*modules(same), *modules(since)]
    assert [name for name in now if not (ROOMS / f"{name.replace('.', '/')}.py").is_file()] == []
    assert len(now) == len(set(now))
    assert FIGURES[way] == f"{len(modules(before))}, {len(modules(same))}, {len(now)}"


def test_all_ways_are_looked_at() -> None:
    assert len(WAYS) == len(FIGURES) == 5
