"""The first lines of `plan` on a terminal of 80 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.cli.views.plan_verdict import RoleRow, resources, role_rows, verdict
from primeslurm.plan.forecast import RoleMemory
from primeslurm.plan.model import Finding
from primeslurm.plan.planner import derive
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.slurm.render import render
from tests.support.cli import primeslurm
from tests.support.golden import assert_golden
from tests.support.planning import reviewed
from tests.support.recipes import model_dir, recipe_data, site, write_recipe

ROOT = Path(__file__).resolve().parents[3]
READY = ["glm5_pd", "qwen3_30b_a3b_one_node", "qwen3_30b_a3b_sft", "glm5_serve"]


@pytest.fixture(autouse=True)
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty Hugging Face cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", READY)
def test_verdict_of_a_ready_recipe_matches_the_golden_file(name: str) -> None:
    shown = primeslurm("plan", f"recipes/{name}.yaml", "--site", "sites/h200.yaml", cwd=ROOT, columns=80)
    assert shown.code == 0
    assert_golden(f"cli/plan-{name}.txt", shown.out)


def test_recipe_that_does_not_fit_says_so_first() -> None:
    words = ("--set", "deployment.train.nodes=3")
    shown = primeslurm("plan", "recipes/glm5_pd.yaml", "--site", "sites/h200.yaml", *words, cwd=ROOT, columns=80)
    assert shown.out.startswith("glm5-pd: does not fit (1 error)\n")


def test_verdict_on_cpus_has_no_memory(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(
        yaml.safe_dump(site(device="cpu", runs="runs").model_dump(mode="json", by_alias=True))
    )
    write_recipe(tmp_path / "r.yaml", model={"path": str(model_dir(tmp_path))})
    shown = primeslurm("plan", "r.yaml", cwd=tmp_path, columns=80)
    assert shown.code == 0, shown.err
    assert_golden("cli/plan-cpu.txt", shown.out)


def test_gpus_of_spare_nodes_count(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "glm5_pd.yaml", ["deployment.spares.train=1"])
    where = load_site(ROOT / "sites" / "h200.yaml")
    plan, (_, estimate) = derive(recipe, where, tmp_path / "run"), reviewed(recipe, where)
    used = resources(plan, role_rows(plan))
    assert used["nodes"].startswith("29 GPU nodes (232 ") and used["time"].startswith("at most 11,136 GPU-hours")
    assert "35 nodes, 232 GPUs" in render(plan).splitlines()[1]
    assert estimate is not None
    assert [amount.value for amount in estimate.amounts if amount.name == "GPU-hours"] == [11136]


def test_local_runs_use_this_machine(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml"))
    plan = derive(recipe, site(device="cpu", nodes={"default": {"gpus": 32}}), tmp_path / "run", local=True)
    assert resources(plan, role_rows(plan)) == {"nodes": "this machine, as 3 nodes"}


MEMORY: dict[str, Any] = {"role": "train", "gpu": "h200", "gpu_gib": 140.0, "limit_gib": 140.0, "parts": {}}


@pytest.mark.parametrize(
    ("needed", "levels", "text"),
    [
        (100.0, [], "fits in GPU memory"),
        (100.0, ["warning", "note"], "fits in GPU memory"),
        (100.0, ["blocked", "blocked"], "fits in GPU memory, but 2 blockers must be removed first"),
        (130.0, ["warning"], "may not fit"),
        (150.0, ["warning"], "may not fit"),
        (160.0, ["error"], "does not fit (1 error)"),
        (100.0, ["error", "blocked"], "cannot run (1 error)"),
    ],
)
def test_verdict_names_what_prevents_the_run(needed: float, levels: list[Any], text: str, tmp_path: Path) -> None:
    plan = derive(load_recipe(write_recipe(tmp_path / "r.yaml", **recipe_data())), site(), tmp_path / "run")
    findings = tuple(Finding(level=level, field="x", text="y") for level in levels)
    row = RoleRow("train", 1, 8, 8, RoleMemory(needed_gib=needed, **MEMORY))
    assert verdict(plan.model_copy(update={"findings": findings}), [row]) == text


def test_placement_of_28_nodes_fits_80_columns() -> None:
    words = ("--site", "sites/h200.yaml", "--placement")
    shown = primeslurm("plan", "recipes/glm5_pd.yaml", *words, cwd=ROOT, columns=80)
    table = shown.out[shown.out.index("placement") :]
    assert max(map(len, shown.out.splitlines())) <= 80
    assert all(
        name in table for name in ("trainer-rank-8..95", "prefill-r0-1..7", "environments[0..3]", "orchestrator")
    )
    assert "ports" not in table
    assert [line.split() for line in table.splitlines() if line.startswith("+")] == [
        ["+1", "control", "(spare)", "-", "-", "-"]
    ]


def test_node_shows_commands_of_its_processes() -> None:
    words = ("plan", "recipes/glm5_pd.yaml", "--site", "sites/h200.yaml", "--node")
    shown = primeslurm(*words, "14", cwd=ROOT, columns=80)
    names = shown.out.splitlines()
    assert names[0] == "node 14: prefill[1]"
    assert all(name in names for name in ("store-14", *(f"prefill-r0-{rank}" for rank in range(8, 16))))
    assert sum("--data-parallel-rank" in line for line in names) == 8
    assert "${...} is filled in on the node" in shown.err
    wrong = primeslurm(*words, "33", cwd=ROOT)
    assert (wrong.code, wrong.err) == (2, "error: --node = 33: the plan has nodes 0 to 32\n")


def test_check_without_a_site_says_nothing_about_its_nodes(tmp_path: Path) -> None:
    shown = primeslurm("check", "glm5_pd", "--no-slurm", cwd=tmp_path)
    assert [line for line in shown.err.splitlines() if line.startswith("error")] == [
        line for line in shown.err.splitlines() if line.startswith("error: --site: there is no site file")
    ]
    assert "there is no site file" in shown.err
