"""Every ready recipe is placed, rendered and checked on the example site with the nodes of its first comment."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from primeslurm.api.sites import local_site
from primeslurm.models.catalog import catalog
from primeslurm.plan.checks.files import model_files
from primeslurm.plan.checks.unsupported import unsupported
from primeslurm.plan.placement.resources import WITHOUT_GPUS
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.slurm.render import render
from tests.support.planning import reviewed

ROOT = Path(__file__).resolve().parents[3]
SITE = load_site(ROOT / "sites" / "h200.yaml")
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LARGE = [path for path in RECIPES if load_recipe(path).model.path in catalog()]
NAMED = re.compile(r"^# (?:It needs )?(\d+) (?:H100 or )?H200 (?:nodes?|GPUs)", re.MULTILINE)


BLOCKED = {
    "gpt_oss_120b": ["policies in bfloat16 are not for engines that start from a checkpoint in mxfp4"],
    "kimi_k2_7_pd": ["policies in bfloat16 are not for engines that start from a checkpoint in int4"],
}
"""Recipes that do not run from the model as it is released, but as `primeslurm convert` writes it, and why."""


def findings(recipe: Recipe, *levels: str) -> list[str]:
    found, _ = reviewed(recipe, SITE)
    return [f"{finding.field}: {finding.text}" for finding in found if finding.level in levels]


def test_there_are_recipes_of_every_kind() -> None:
    loaded = [load_recipe(path) for path in LARGE]
    assert len(loaded) >= 12
    assert {recipe.task for recipe in loaded} == {"rl", "sft", "serve"}
    assert {recipe.deployment.inference.type for recipe in loaded} == {"single_node", "multi_node", "disaggregated"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_renders_to_a_valid_bash_script(path: Path, tmp_path: Path) -> None:
    script = render(derive(load_recipe(path), SITE, tmp_path))
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_recipe_has_no_conflicts_and_fits(path: Path) -> None:
    recipe = load_recipe(path)
    assert not findings(recipe, "error")
    assert not [text for text in findings(recipe, "warning") if "fit" in text]
    assert not [text for text in findings(recipe, "note") if "parser" in text]


def test_gradients_that_are_reduced_once_do_not_fit_beside_744_billion_parameters() -> None:
    recipe = load_recipe(ROOT / "recipes" / "glm5_pd.yaml")
    layout = recipe.trainer.parallelism.model_copy(update={"reduce_gradients": "step"})
    trainer = recipe.trainer.model_copy(update={"parallelism": layout})
    found, _ = reviewed(recipe.model_copy(update={"trainer": trainer}), SITE)
    (refused,) = [finding for finding in found if finding.level == "error"]
    assert refused.field == "deployment.train" and "does not fit" in refused.text
    assert refused.fix == "trainer.parallelism.reduce_gradients: micro_batch, or raise ep"


def test_remedies_that_are_set_are_not_recommended() -> None:
    recipe = load_recipe(ROOT / "recipes" / "glm5_pd.yaml", ["trainer.parallelism.cp=4"])
    assert recipe.trainer.memory.activation_offload
    found, _ = reviewed(recipe, SITE)
    assert [finding.fix for finding in found if finding.field == "deployment.train"] == ["raise trainer.parallelism.cp"]
    memory = recipe.trainer.memory.model_copy(update={"activation_offload": False})
    found, _ = reviewed(
        recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"memory": memory})}), SITE
    )
    fixes = [finding.fix for finding in found if finding.field == "deployment.train"]
    assert fixes == ["raise trainer.parallelism.cp, or trainer.memory.activation_offload: true"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_trainer_supports_the_recipe(path: Path) -> None:
    recipe = load_recipe(path)
    model = model_files(recipe)
    assert [finding.text for finding in unsupported(recipe, model.shape, model.model_type)] == BLOCKED.get(
        path.stem, []
    )


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_comment_at_the_top_of_the_recipe_names_its_nodes(path: Path, tmp_path: Path) -> None:
    plan = derive(load_recipe(path), SITE, tmp_path)
    gpu_nodes = sum(1 for node in plan.nodes if node.role not in WITHOUT_GPUS)
    (named,) = NAMED.findall(path.read_text())
    assert int(named) == (plan.totals.gpus if plan.layout == "one_node" else gpu_nodes)
    environments = re.findall(r"(\d+) for environments", path.read_text())
    assert list(map(int, environments)) == [plan.totals.environment_nodes] * bool(plan.totals.environment_nodes)
    assert "Where the numbers come from" in path.read_text() or load_recipe(path).trainer.router_replay


def test_glm5_runs_on_28_nodes_with_three_prefill_nodes_for_each_decode_node(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "glm5_pd.yaml")
    plan = derive(recipe, SITE, tmp_path)
    nodes = {group.name: group.nodes for group in plan.groups}
    assert nodes == {"control": 2, "train": 12, "prefill": 12, "decode": 4, "environments": 4}
    assert plan.survives_nodes and (plan.totals.nodes, plan.totals.spares) == (33, 1)
    assert (plan.totals.gpus, plan.totals.engines, plan.totals.routers) == (224, 128, 1)
    assert (recipe.orchestrator.batch_size, recipe.seq_len) == (256, 131072)


ONE_NODE = ("qwen3_8b_single_node", "qwen3_30b_a3b_one_node")


@pytest.mark.parametrize("name", ONE_NODE)
def test_a_one_node_recipe_fits_one_machine_without_slurm(name: str, tmp_path: Path) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    for index in range(8):
        (devices / f"nvidia{index}").touch()
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    plan = derive(recipe, local_site(tmp_path, devices), tmp_path / "run", local=True)
    assert sorted(gpu for process in plan.processes() for gpu in process.gpus) == list(range(8))
