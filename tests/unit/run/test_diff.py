"""Differences between plans, part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.api.recipes.loading import load
from primeslurm.base.files import write_json
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe
from primeslurm.run.diff import NOT_COMPARED, Difference, diff, options, recipe_diff
from primeslurm.run.directory import RunDirectory, create
from tests.support.cli import primeslurm
from tests.support.golden import assert_golden
from tests.support.recipes import recipe_data, site

ROOT = Path(__file__).resolve().parents[3]


def plan_with(name: str = "r", **changes: Any) -> Plan:
    recipe = Recipe.model_validate(recipe_data(**{"name": name, **changes}))
    return derive(recipe, site(), Path("/runs") / name)


INFERENCE = {"type": "multi_node", "num_replicas": 2, "gpus_per_node": 2}


def value_rows(differences: list[Difference]) -> set[tuple[str, str, str | None, str | None]]:
    return {(each.where, each.field, each.a, each.b) for each in differences}


def test_two_runs_of_one_recipe_are_equal() -> None:
    assert diff(plan_with("a"), plan_with("b")) == []


def test_option_of_all_engines_is_one_difference() -> None:
    before = plan_with(deployment={"inference": INFERENCE})
    after = plan_with(deployment={"inference": INFERENCE}, inference={"vllm_extra": {"max_num_seqs": 8}})
    (difference,) = diff(before, after)
    assert (difference.where, difference.field, difference.a, difference.b) == (
        "engine",
        "argv --max-num-seqs",
        None,
        "8",
    )
    assert difference.members == ["engine-r0-0", "engine-r0-1", "engine-r1-0", "engine-r1-1"]


def test_added_replica_differs_in_totals_groups_replicas_and_processes() -> None:
    two = plan_with(deployment={"inference": INFERENCE})
    three = plan_with(deployment={"inference": {**INFERENCE, "num_replicas": 3}})
    differences = diff(two, three)
    assert {
        ("totals", "engines", "4", "6"),
        ("group inference", "nodes", "2", "3"),
        ("engine", "process", None, "present"),
    } <= value_rows(differences)
    (replica,) = [each for each in differences if each.where == "replica 2"]
    assert replica.a is None and replica.b is not None and "router=router-2" in replica.b
    (added,) = [each for each in differences if each.where == "engine"]
    assert added.members == ["engine-r2-0", "engine-r2-1"]
    # Peers are compared one by one, so common peers are not listed.
    assert not any("engine-r0-0" in each.field for each in differences)


def test_job_options_and_environment_variables_are_compared() -> None:
    differences = diff(plan_with(), plan_with(slurm={"time": "02:00:00", "qos": "high"}, inference={"env": {"X": "1"}}))
    assert {("job", "qos", "null", "high"), ("engine", "env.X", None, "1")} <= value_rows(differences)
    assert any(each.where == "job" and each.field == "time" for each in differences)


def test_names_in_not_compared_are_fields() -> None:
    assert all(names <= part.model_fields.keys() for part, names in NOT_COMPARED.items())


def test_command_lines_are_split_into_options() -> None:
    argv = ("python", "-m", "x", "--flag", "--n", "3", "--x=1", "--peers", "a=1,b=2", "--conf", '{"k": {"v": true}}')
    assert options(argv) == {
        "command": "python -m x",
        "--flag": "set",
        "--n": "3",
        "--x": "1",
        "--peers a=1": "present",
        "--peers b=2": "present",
        "--conf.k.v": "true",
    }
    assert options(("x", "--conf", "{no json")) == {"command": "x", "--conf": "{no json"}


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
    assert [(each["where"], each["field"], each["b"]) for each in json.loads(result.out)] == [
        ("recipe", "slurm.qos", "high"),
        ("job", "qos", "high"),
    ]
    plan = Plan.model_validate_json(primeslurm("plan", "b.yaml", "--json", cwd=place).out)
    run = RunDirectory(place / "runs" / "started")
    run.attempt(1).prepare(plan)
    write_json(run.path / "lock.json", {"run_id": "started-1"})
    result = primeslurm("diff", str(run.path), "a.yaml", cwd=place)
    assert result.code == 1 and result.out.split()[-4:] == ["job", "qos", "high", "null"]
    assert primeslurm("diff", str(run.path), "b.yaml", cwd=place).err == "no difference\n"


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
    assert [(each.where, each.field, each.a, each.b) for each in recipe_diff(one, other)] == [
        ("recipe", "seq_len", "8", "16"),
        ("recipe", "deployment.inference.type", "multi_node", "single_node"),
        ("recipe", "deployment.inference.nodes", "2", None),
        ("recipe", "deployment.inference.gpus", None, "4"),
        ("recipe", "environments.0.workers", "1", "2"),
        ("recipe", "trainer.loss.clip", "0.2", "0.3"),
    ]
    assert recipe_diff(one, one) == []


def test_run_equals_its_own_recipe(place: Path) -> None:
    loaded = load(place / "a.yaml", site=place / "site.yaml")
    planned = loaded.resolve()
    create(planned.recipe, planned.plan.model_copy(update={"run_dir": str(place / "runs" / "a")}), place / "a.yaml")
    (place / "c.yaml").write_text("extends: a.yaml\nmax_steps: 9\n")
    result = primeslurm("diff", str(place / "runs" / "a"), "c.yaml", cwd=place)
    assert result.code == 1 and result.out.splitlines()[1].split() == ["max_steps", "4", "9"]


@pytest.mark.parametrize("words", [(), ("--all",)], ids=["short", "all"])
def test_diff_of_ready_recipes_begins_with_recipe_fields(words: tuple[str, ...]) -> None:
    sides = ("recipes/glm5_pd.yaml", "recipes/glm5_r3.yaml")
    shown = primeslurm("diff", *sides, "--site", "sites/h200.yaml", *words, cwd=ROOT, columns=80)
    assert shown.code == 1
    if words:
        assert "differences: run" in shown.out and "prefill-r0-" in shown.out and shown.err == ""
    else:
        assert_golden("cli/diff.txt", shown.out + shown.err)
