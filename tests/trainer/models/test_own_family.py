"""A family that a package of its own adds: it is checked and trained, without a change to this package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.support.ports import free_port
from benchmarks.support.servers import rank_environment
from primeslurm.recipe.reading.recipe_files import load_recipe
from scripts.models import tiny_model
from tests.trainer.conftest import ROOT, trainer_command

EXAMPLE = ROOT / "examples" / "own_family"


def run(directory: Path, packages: Path | None, *arguments: str) -> str:
    """What `python arguments...` prints in `directory`, with `packages` installed."""
    path = os.pathsep.join(map(str, filter(None, [ROOT, packages])))
    environment = os.environ | {"PYTHONPATH": path} | rank_environment(0, 1, free_port())
    done = subprocess.run([sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as an installer leaves it: its modules, and its entry points beside them."""
    directory = tmp_path_factory.mktemp("packages")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    shutil.copytree(EXAMPLE / "own_family", directory / "own_family")
    about = directory / f"own_family-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (about / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in project["entry-points"].items()
        )
    )
    return directory


@pytest.fixture(scope="module")
def directory(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example's recipe finds model and data; beside it the same model as a Qwen3."""
    directory = tmp_path_factory.mktemp("checkout")
    made = directory / ".primeslurm" / "own-family"
    run(directory, packages, "-m", "own_family.tiny", str(made / "model"))
    (made / "demonstrations.jsonl").write_text(
        "".join(json.dumps(c) + "\n" for c in tiny_model.demonstrations(64, 0.0, 0))
    )
    shutil.copytree(made / "model", made / "qwen3")
    config = made / "qwen3" / "config.json"
    config.write_text(config.read_text().replace('"maple"', '"qwen3"'))
    return directory


@pytest.mark.campaign
def test_recipe_is_valid_if_the_package_is_installed(directory: Path, packages: Path) -> None:
    missing = "the trainer has no implementation of its own for model type 'maple'"
    words = ("-m", "primeslurm", "check", str(EXAMPLE / "recipe.yaml"), "--local")
    assert missing in run(directory, None, *words)
    assert missing not in run(directory, packages, *words)


def test_training_equals_that_of_the_reused_family(directory: Path, packages: Path) -> None:
    losses = {}
    for model in ("model", "qwen3"):
        path = f"model.path=.primeslurm/own-family/{model}"
        recipe = load_recipe(EXAMPLE / "recipe.yaml", [path, "max_steps=2", "monitor.tensorboard=false"])
        file, out = directory / f"{model}.json", directory / f"run-{model}"
        file.write_text(recipe.model_dump_json(by_alias=True))
        (out / "attempts" / "1").mkdir(parents=True)
        run(directory, packages, "-m", *trainer_command(file, out, 1))
        losses[model] = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        published = json.loads(next(out.glob("weights/*/config.json")).read_text())
        assert published["model_type"] == ("maple" if model == "model" else "qwen3")
    assert len(losses["model"]) == 2
    assert losses["model"] == losses["qwen3"]
