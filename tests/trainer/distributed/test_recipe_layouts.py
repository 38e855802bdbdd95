"""The trainer of every ready recipe at its real size: model, optimizer, checkpoint, transfer and memory per rank.

Layers repeat, so most recipes are tested with their first layers only. The flagship and Muon have all of them.
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
"""Four layers cover dense and sparse, sliding and full ones."""
RANKS = {"glm5_pd": "0", "glm5_r3": "1,-1", "intellect3": "0", "qwen3_30b_a3b_sft": "", "qwen3_8b_single_node": ""}
"""All ranks of two recipes; the first and the last rank of the others."""


@pytest.fixture(scope="module")
def layouts() -> dict[str, dict[str, Any]]:
    """Results by recipe, computed in another process because this one may have real process groups."""
    asked = [f"{PATHS[name]}:{LAYERS.get(name, '4')}:{RANKS.get(name, '0,-1')}" for name in TRAINED]
    command = [sys.executable, "-m", "benchmarks", "trainer_layouts", *asked]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = map(json.loads, done.stdout.splitlines())
    return {layout["recipe"]: layout for layout in found}


@pytest.mark.parametrize("name", TRAINED)
def test_recipe_layouts_hold_every_tensor_once(name: str, layouts: dict[str, dict[str, Any]]) -> None:
    assert layouts[name]["faults"] == []


@pytest.mark.parametrize("name", TRAINED)
def test_state_bytes_match_the_plan(name: str, layouts: dict[str, dict[str, Any]]) -> None:
    muon = RECIPES[name].trainer.optimizer.type == "muon"  # moments of AdamW, for embedding and head, are not counted
    for part, apart in layouts[name]["apart"].items():
        # The last ranks have less of what does not come out even, such as a vocabulary over 96 of them.
        assert -0.02 < apart < (0.02 if muon else 0.002), part
