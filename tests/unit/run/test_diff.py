"""Differences between two recipes or runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from primeslurm.api.recipes.loading import load
from primeslurm.run.diff import recipe_diff
from primeslurm.run.directory import create
from tests.support.cli import primeslurm
from tests.support.golden import assert_golden
from tests.support.recipes import recipe_data, site

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A recipe, a variant of it, and a run of it."""
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site().model_dump(mode="json", by_alias=True)))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe_data(name="a")))
    (tmp_path / "b.yaml").write_text("extends: a.yaml\nslurm: {qos: high}\n")
    return tmp_path


def test_recipe_can_be_compared_with_a_run(place: Path) -> None:
    assert (primeslurm("diff", "a.yaml", "a.yaml", cwd=place).code) == 0
    result = primeslurm("diff", "a.yaml", "b.yaml", "--json", cwd=place)
    assert result.code == 1, result.err
    assert json.loads(result.out) == [{"field": "slurm.qos", "a": None, "b": "high"}]
    loaded = load(place / "b.yaml", site=place / "site.yaml").resolve()
    run = place / "runs" / "started"
    create(loaded.recipe, loaded.plan.model_copy(update={"run_dir": str(run)}), place / "b.yaml")
    result = primeslurm("diff", str(run), "a.yaml", cwd=place)
    assert result.code == 1 and result.out.split()[-3:] == ["slurm.qos", "high", "-"]
    assert primeslurm("diff", str(run), "b.yaml", cwd=place).err == "no difference\n"
    (run / "recipe.resolved.json").unlink()
    assert "is missing or damaged" in primeslurm("diff", str(run), "b.yaml", cwd=place).err


def test_unknown_name_is_an_error(place: Path) -> None:
    result = primeslurm("diff", "a.yaml", "nothing", cwd=place)
    assert result.code == 4 and "there is no run nothing in" in result.err


def test_fields_of_recipes_are_compared_by_path() -> None:
    one = {
        "name": "a",
        "seq_len": 8,
        "deployment": {"inference": {"type": "multi_node", "nodes": 2, "spares": None}},
        "environments": [{"id": "x", "workers": 1}],
        "trainer": {"loss": {"type": "dppo", "clip": 0.2}},
    }
    other = {
        "name": "b",
        "seq_len": 16,
        "deployment": {"inference": {"type": "single_node", "gpus": 4, "images": []}},
        "environments": [{"id": "x", "workers": 2}],
        "trainer": {"loss": {"type": "dppo", "clip": 0.3}},
    }
    assert [(each.field, each.a, each.b) for each in recipe_diff(one, other)] == [
        ("seq_len", "8", "16"),
        ("deployment.inference.type", "multi_node", "single_node"),
        ("deployment.inference.nodes", "2", None),
        ("deployment.inference.gpus", None, "4"),
        ("environments.0.workers", "1", "2"),
        ("trainer.loss.clip", "0.2", "0.3"),
    ]
    assert recipe_diff(one, one) == []


def test_run_equals_its_own_recipe(place: Path) -> None:
    loaded = load(place / "a.yaml", site=place / "site.yaml")
    planned = loaded.resolve()
    create(planned.recipe, planned.plan.model_copy(update={"run_dir": str(place / "runs" / "a")}), place / "a.yaml")
    (place / "c.yaml").write_text("extends: a.yaml\nmax_steps: 9\n")
    result = primeslurm("diff", str(place / "runs" / "a"), "c.yaml", cwd=place)
    assert result.code == 1 and result.out.splitlines()[1].split() == ["max_steps", "4", "9"]


def test_diff_of_ready_recipes_begins_with_recipe_fields() -> None:
    sides = ("recipes/glm5_pd.yaml", "recipes/glm5_r3.yaml")
    shown = primeslurm("diff", *sides, "--site", "sites/h200.yaml", cwd=ROOT, columns=80)
    assert shown.code == 1
    assert_golden("cli/diff.txt", shown.out + shown.err)
