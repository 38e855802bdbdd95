"""Generated pages are current."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from primeslurm.recipe import Recipe, Site
from scripts.recipe_reference import markdown

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("script", ["docs", "learning_curve", "measurements", "migration"])
def test_generated_pages_are_current(script: str) -> None:
    argv = [sys.executable, f"scripts/{script}.py", "--check"]
    done = subprocess.run(argv, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_reference_names_every_section_and_field() -> None:
    text = markdown(Recipe)
    schema = Recipe.model_json_schema(by_alias=True)
    for name, section in [("Recipe", schema), *schema["$defs"].items()]:
        assert f"## {name}\n" in text
        for field in section["properties"]:
            assert f"| `{field}` |" in text


@pytest.mark.parametrize("model", [Recipe, Site])
def test_every_field_has_a_description(model: type[BaseModel]) -> None:
    schema = model.model_json_schema(by_alias=True)
    short = [
        f"{name}.{field}"
        for name, section in [(model.__name__, schema), *schema["$defs"].items()]
        for field, data in section["properties"].items()
        if len(data.get("description", "").split()) < 4
    ]
    assert short == []


@pytest.mark.parametrize("model", [Recipe, Site])
def test_every_section_and_field_of_the_reference_has_a_meaning(model: type[BaseModel]) -> None:
    rows = [line for line in markdown(model).splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    for row in rows:
        assert len(row.split(" | ")[-1].removesuffix(" |").split()) >= 4, row


def test_published_numbers_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "explanation" / "planning.md").read_text()
    trainer = json.loads((ROOT / "benchmarks" / "results" / "memory_model.json").read_bytes())["trainer_gib"]
    assert f"mean {trainer['mean_absolute_error_percent']:g} %, worst {trainer['worst_error_percent']:g} %" in page
