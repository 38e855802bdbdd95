"""A plan's file is small, and gives the plan back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from primeslurm.base.errors import RunError
from primeslurm.plan.emulate import emulate
from primeslurm.plan.model import Plan, Process
from primeslurm.plan.plan_file import fold, from_file, plain, to_file, unfold
from primeslurm.plan.planner import derive
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.plan_outline import PlanOutline, ProcessOutline, read_outline
from tests.support.plans import plan_of

ROOT = Path(__file__).resolve().parents[3]
SITE = load_site(ROOT / "sites" / "h200.yaml")
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TEXT = st.text(st.sampled_from("ab-%(+)0129 {}$\u0663\n"), max_size=12) | st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def scaled(train_nodes: int, replicas: int) -> Plan:
    changes = [f"deployment.train.nodes={train_nodes}", f"deployment.inference.num_replicas={replicas}"]
    return derive(load_recipe(ROOT / "recipes" / "glm5_pd.yaml", changes), SITE, Path("/shared/run"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_ready_recipe_is_the_same_again(path: Path) -> None:
    plan = derive(load_recipe(path), SITE, Path("/shared/run"))
    for each in (plan, emulate(plan)):
        again = from_file(to_file(each).encode())
        assert again == each and again.to_json() == each.to_json()
        assert plain(to_file(each).encode()) == json.loads(each.to_json())


@given(st.lists(st.dictionaries(TEXT, JSON, max_size=4), max_size=5))
@example([{"%": 1}, {"%": 2}])
@example([{"a": "%(0)", "b": i, "c": f"x{i}y007", "n1": f"{i + 8}"} for i in range(3)])
@example([{"a": 1}, {"a": True}, {"a": 1.0}, {"a": "1"}, {"a": -1}, {"a": 10**30}])
@settings(deadline=None)
def test_whatever_is_folded_is_unfolded(things: list[dict[str, Any]]) -> None:
    folded = json.loads(json.dumps(fold(things)))
    again = unfold(folded)
    assert json.dumps(again) == json.dumps(things), "also in the order of keys, and in types that Python calls equal"


@given(st.lists(st.tuples(TEXT, TEXT, TEXT, st.integers(0, 65535)), max_size=6), st.integers(1, 3))
@settings(deadline=None)
def test_plans_with_any_texts_are_the_same_again(words: list[tuple[str, str, str, int]], nodes: int) -> None:
    processes = [
        Process(
            name=f"{name}-{i}", role="engine", node=i % nodes, argv=(name, word), env={word: value}, log=word,
            ports={name: port}, files={value: word}, after=(word,),
        )
        for i, (name, word, value, port) in enumerate(words)
    ]  # fmt: skip
    plan = plan_of(Path("/r"), *(tuple(p for p in processes if p.node == node) for node in range(nodes)))
    assert from_file(to_file(plan).encode()) == plan


def test_a_plan_of_a_thousand_nodes_is_less_than_a_megabyte() -> None:
    plan = scaled(512, 32)
    text = to_file(plan)
    assert len(plan.nodes) == 1029 and len(plan.processes()) == 8754
    assert len(text) < 500_000 < 20_000_000 < len(plan.to_json())
    assert len(json.loads(text)["processes"]["templates"]) < 20
    assert plain(text.encode()) == json.loads(plan.to_json())


def test_who_watches_reads_only_what_it_needs(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "r").attempt(1)
    plan = scaled(4, 2)
    attempt.prepare(plan)
    assert read_outline(attempt) == msgspec.json.decode(plan.to_json(), type=PlanOutline)
    fields = ProcessOutline.__struct_fields__
    shown = plain(attempt.plan_file.read_bytes(), fields)["nodes"][0]["processes"][0]
    assert shown.keys() == set(fields)


def test_a_plan_written_at_length_is_read_as_well(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "r").attempt(1)
    plan = scaled(4, 2)
    attempt.prepare(plan)
    folded = read_outline(attempt)
    attempt.plan_file.write_text(plan.to_json())
    assert attempt.plan() == plan and read_outline(attempt) == folded


@pytest.mark.parametrize(
    "change",
    [
        {"processes": {"templates": [], "rows": [[0, 1]]}},
        {"processes": {"templates": [{"name": "%(7)"}], "rows": [[0, 1], [0, 2]]}},
        {"processes": {"templates": [{"name": {"%": "x"}}], "rows": [[0], [0]]}},
        {"processes": {"templates": [{"name": {"%": 3}}], "rows": [[0], [0]]}},
        {"processes": {"templates": [], "rows": []}},
        {"processes": []},
        {"nodes": {}},
        {"nodes": {"templates": [{"processes": "x"}], "rows": [[0]]}},
        {"nodes": {"templates": ["x"], "rows": [[0]]}},
    ],
)
def test_a_damaged_one_is_a_run_error(change: dict[str, Any], tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "r").attempt(1)
    attempt.prepare(plan_of(tmp_path / "r", tuple(_process(i) for i in range(2))))
    attempt.plan_file.write_text(json.dumps(json.loads(attempt.plan_file.read_text()) | change))
    for read in (attempt.plan, lambda: read_outline(attempt)):
        with pytest.raises(RunError, match="cannot be read"):
            read()


def _process(index: int) -> Process:
    return Process(name=f"p-{index}", role="engine", node=0, argv=("x",), log="x.log")
