"""Plan files: round trip, files of version 0.2.0, and damaged files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeslurm.base.errors import RunError
from primeslurm.plan.model import Plan, Process
from primeslurm.plan.plan_file import from_file, plain, to_file
from primeslurm.plan.planner import derive
from primeslurm.plan.stand_ins import emulate
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.plan_outline import PlanOutline, read_outline
from tests.support.plans import plan_of

ROOT = Path(__file__).resolve().parents[3]
SITE = load_site(ROOT / "sites" / "h200.yaml")
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TEXT = st.text(st.sampled_from("ab-%(+)0129 {}$\u0663\n"), max_size=12) | st.text(max_size=6)
# Two processes as version 0.2.0 wrote them
FOLDED: dict[str, Any] = {
    "nodes": {"templates": [{"index": {"%": "%(0)"}, "processes": 1}], "rows": [[0, 0], [0, 1]]},
    "processes": {
        "templates": [{"name": "p-%(0)", "port": {"%": "%(0+8000)"}, "share": "50%%", "after": ["p-%(1)"]}],
        "rows": [[0, 0, 7], [0, 1, 9]],
    },
    "replicas": {"templates": [{"router": "r-0"}], "rows": [[0]]},
}


def scaled(train_nodes: int, replicas: int) -> Plan:
    changes = [f"deployment.train.nodes={train_nodes}", f"deployment.inference.num_replicas={replicas}"]
    return derive(load_recipe(ROOT / "recipes" / "glm5_pd.yaml", changes), SITE, Path("/shared/run"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_plan_of_every_shipped_recipe_survives_write_and_read(path: Path) -> None:
    plan = derive(load_recipe(path), SITE, Path("/shared/run"))
    for each in (plan, emulate(plan)):
        again = from_file(to_file(each))
        assert again == each and again.to_json() == each.to_json()
        assert plain(to_file(each)) == json.loads(each.to_json())


@given(st.lists(st.tuples(TEXT, TEXT, TEXT, st.integers(0, 65535)), max_size=6), st.integers(1, 3))
@settings(deadline=None)
def test_plan_with_any_text_survives_write_and_read(words: list[tuple[str, str, str, int]], nodes: int) -> None:
    processes = [
        Process(
            name=f"{name}-{i}", role="engine", node=i % nodes, argv=(name, word), env={word: value}, log=word,
            ports={name: port}, files={value: word}, after=(word,),
        )
        for i, (name, word, value, port) in enumerate(words)
    ]  # fmt: skip
    plan = plan_of(Path("/r"), *(tuple(p for p in processes if p.node == node) for node in range(nodes)))
    assert from_file(to_file(plan)) == plan


def test_plan_of_a_thousand_nodes_is_compressed() -> None:
    plan = scaled(512, 32)
    content = to_file(plan)
    assert len(plan.nodes) == 1029 and len(plan.processes()) == 8770
    assert content.startswith(b"\x1f\x8b") and len(content) < 500_000
    assert to_file(plan) == content
    assert plain(content) == json.loads(plan.to_json())


def test_status_reads_the_same_placement_from_plain_and_compressed_plans(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "r").attempt(1)
    plan = scaled(4, 2)
    attempt.prepare(plan)
    placement = read_outline(attempt)
    assert placement == msgspec.json.decode(plan.to_json(), type=PlanOutline)
    for content in (plan.to_json().encode(), gzip.compress(plan.to_json().encode())):
        attempt.plan_file.write_bytes(content)
        assert attempt.plan() == plan and read_outline(attempt) == placement


def test_plan_of_version_0_2_0_is_read() -> None:
    assert plain(json.dumps(FOLDED).encode()) == {
        "nodes": [
            {"index": 0, "processes": [{"name": "p-0", "port": 8000, "share": "50%", "after": ["p-7"]}]},
            {"index": 1, "processes": [{"name": "p-1", "port": 8001, "share": "50%", "after": ["p-9"]}]},
        ],
        "replicas": [{"router": "r-0"}],
    }


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
def test_damaged_plan_of_version_0_2_0_is_a_run_error(change: dict[str, Any], tmp_path: Path) -> None:
    _assert_unreadable(json.dumps(FOLDED | change).encode(), tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, gzip.compress(b"{}")[:-4], b"\x1f\x8bx"])
def test_damaged_plan_is_a_run_error(content: bytes, tmp_path: Path) -> None:
    _assert_unreadable(content, tmp_path)


def _assert_unreadable(content: bytes, tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "r").attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.plan_file.write_bytes(content)
    for read in (attempt.plan, lambda: read_outline(attempt)):
        with pytest.raises(RunError, match="cannot be read"):
            read()
