"""Packages have few entries, and the architecture page describes their contents."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "primeslurm"
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
MOST = 15
LARGER = {
    ".": "all packages",
    "api": "one module for each thing that a command does",
    "cli/verbs": "one module for each command, or for a few similar ones",
    "models": "one folder for each family",
    "recipe/sections": "one module for each section",
    "records": "one module for each kind of record",
    "tinker": "one module for each part of the service",
}
"""Packages with more entries, and why."""


def entries(package: Path) -> list[str]:
    """Return the names of the modules and packages in a package."""
    return [
        path.name
        for path in package.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
        if path.name not in ("__init__.py", "__main__.py")
    ]


def table(header: str) -> list[list[str]]:
    """Return the cells of the page's table with this header."""
    rows = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_packages_have_few_entries() -> None:
    crowded = {str(path.relative_to(SOURCE)) for path in PACKAGES if len(entries(path)) > MOST}
    assert crowded <= LARGER.keys()
    assert len(PACKAGES) > 50


def test_table_names_every_package_and_layer() -> None:
    named = {name for row in table("| Package |") for name in re.findall(r"`([\w/]+)`", row[0])}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each.get("containers") == ["primeslurm"]]
    shown = re.search(r"^```text\n(cli\n.*?)```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None and shown[1].splitlines() == layers
    assert {name for layer in layers for name in layer.split(" | ")} == named
    assert {path.name for path in PACKAGES if path.parent == SOURCE} <= named


def test_subpackages_in_the_table_exist() -> None:
    for names, contents in table("| Package |"):
        outer = [SOURCE / name for name in re.findall(r"`([\w/]+)`", names)]
        for inner in re.findall(r"`(\w+)`", contents):
            assert any((package / inner).is_dir() for package in outer), f"{inner} is not in {names}"


@pytest.mark.parametrize(("flow", "modules"), table("| Flow |"), ids=[row[0] for row in table("| Flow |")])
def test_modules_of_data_flows_exist(flow: str, modules: str) -> None:
    names = re.findall(r"`([\w.]+)`", modules)
    assert len(names) > 3 and len(names) == len(set(names))
    assert [name for name in names if not (SOURCE / f"{name.replace('.', '/')}.py").is_file()] == []


def test_files_in_the_table_of_questions_exist() -> None:
    for _, where in table("| Question |"):
        assert [name for name in re.findall(r"`([\w/.]+)`", where) if not (SOURCE / name).exists()] == []
