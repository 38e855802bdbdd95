"""Every ready recipe's trainer at its real size: model, optimizer, names, checkpoint, sending and memory of its ranks.

Layers are repeated exactly, so of most recipes there are only the first ones, with every kind of layer; of the
flagship, and beside Muon, there are all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from primeslurm.models.catalog import catalog
from primeslurm.recipe.reading.recipe_files import load_recipe

pytestmark = pytest.mark.usefixtures("unmeasured")

ROOT = Path(__file__).resolve().parents[3]
PATHS = {path.stem: path for path in [*sorted((ROOT / "recipes").glob("*.yaml")), ROOT / "tests/data/glm4_9b.yaml"]}
RECIPES = {name: load_recipe(path) for name, path in PATHS.items()}
TRAINED = [name for name, recipe in RECIPES.items() if recipe.model.path in catalog() and recipe.task in ("rl", "sft")]
LAYERS = {"glm5_pd": "", "glm5_r3": "5", "nemotron3_ultra_pd": "9", "intellect3": ""}
"""Of the others 4 are enough: dense and sparse, sliding and full."""
RANKS = {"glm5_pd": "0", "glm5_r3": "1,-1", "intellect3": "0", "qwen3_30b_a3b_sft": "", "qwen3_8b_single_node": ""}
"""All of one with experts and of one without; of the others the first and the last, which has what is left."""


EVERY_COMMIT = ("glm5_r3", "nemotron3_ultra_pd", "qwen3_30b_a3b_sft")
"""Sparse and latent attention, recurrences, and all ranks of a recipe."""
CASES = [name if name in EVERY_COMMIT else pytest.param(name, marks=pytest.mark.campaign) for name in TRAINED]


@pytest.fixture(scope="module")
def layouts(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return the results by recipe, from a separate process, because groups of this one may be real."""
    names = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}  # type: ignore[attr-defined]
    asked = [f"{PATHS[name]}:{LAYERS.get(name, '4')}:{RANKS.get(name, '0,-1')}" for name in sorted(names)]
    command = [sys.executable, "-m", "benchmarks", "trainer_layouts", *asked]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr
    actual = map(json.loads, done.stdout.splitlines())
    return {layout["recipe"]: layout for layout in actual}


@pytest.mark.parametrize("name", CASES)
def test_everything_is_there_once(name: str, layouts: dict[str, dict[str, Any]]) -> None:
    assert layouts[name]["faults"] == []


@pytest.mark.parametrize("name", CASES)
def test_states_take_what_was_planned(name: str, layouts: dict[str, dict[str, Any]]) -> None:
    muon = RECIPES[name].trainer.optimizer.type == "muon"  # moments of AdamW, for embedding and head, are not counted
    for part, apart in layouts[name]["apart"].items():
        # The last ranks have less of what does not come out even, such as a vocabulary over 96 of them.
        assert -0.02 < apart < (0.02 if muon else 0.002), part
