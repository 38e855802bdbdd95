"""`primeslurm eval`: the evaluated model, and the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primeslurm.api.recipes.evaluation import load_evaluation
from primeslurm.base.errors import RunError, UsageError
from primeslurm.base.files import write_json
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.wire.weight_transfer import filesystem
from tests.support.recipes import model_dir, write_recipe

EVALUATION = {
    "environments": [{"id": "reverse-text", "name": "held-out", "workers": 2}],
    "keep_best": "held-out/pass@1",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    changes = {
        "teacher": {"type": "engines", "path": "/models/teacher"},
        "trainer": {"loss": {"type": "dppo", "ref_kl": 0.1}},
    }
    path = str(model_dir(tmp_path))
    return write_recipe(tmp_path / "r.yaml", model={"path": path}, evaluation=EVALUATION, **changes)


@pytest.fixture
def run(tmp_path: Path, recipe: Path) -> Path:
    """A run that has published the policies of steps 10 and 20."""
    directory = tmp_path / "runs" / "trained"
    directory.mkdir(parents=True)
    resolved = load_recipe(recipe).model_dump(mode="json", by_alias=True)
    write_json(directory / "recipe.resolved.json", resolved)
    write_json(directory / "lock.json", {"run_id": "trained-1"})
    for step in (10, 20):
        version = filesystem.version_dir(directory, step)
        version.mkdir(parents=True)
        (version / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
        (version / "model.safetensors").touch()
        filesystem.complete(version, step, "float32")
    return directory


def test_model_of_a_recipe_is_evaluated_without_a_trainer(recipe: Path) -> None:
    loaded = load_evaluation(str(recipe), local=True)
    assert (loaded.recipe.name, loaded.recipe.task, loaded.recipe.teacher) == ("test-run-eval", "eval", None)
    plan = loaded.plan()
    assert {process.role for process in plan.processes()} == {"engine", "router", "orchestrator", "environment"}
    workers = [process.name for process in plan.processes() if process.role == "environment"]
    assert workers == ["environment-held-out-0", "environment-held-out-1"]
    assert plan.totals.trainer_gpus == 0 and loaded.recipe.max_evaluation_inflight == loaded.recipe.max_inflight


def test_settings_of_training_do_not_change_the_evaluated_model(recipe: Path, tmp_path: Path) -> None:
    """Engines load the evaluated model, and spares of trainer and teacher are left out."""
    training = {"inference": {"model": "/models/base-fp8"}, "deployment": {"spares": {"train": 1, "teacher": 1}}}
    model = load_evaluation(str(recipe), local=True).recipe.model.path
    changed = write_recipe(tmp_path / "t.yaml", model={"path": model}, evaluation=EVALUATION, **training)
    engines = [p for p in load_evaluation(str(changed), local=True).plan().processes() if p.role == "engine"]
    assert {engine.argv[engine.argv.index("--model") + 1] for engine in engines} == {model}


@pytest.mark.parametrize(("step", "published"), [(None, 20), (20, 20), (10, 10)])
def test_published_policy_of_a_run_is_evaluated(run: Path, step: int | None, published: int) -> None:
    loaded = load_evaluation(str(run), step=step, local=True)
    assert loaded.recipe.name == f"trained-eval-{published}"
    assert loaded.recipe.model.path == str(run / "weights" / f"v{published:06d}")
    assert all(loaded.recipe.model.path in " ".join(p.argv) for p in loaded.plan().processes() if p.role == "engine")


def test_newest_whole_policy_is_evaluated_if_deltas_follow(run: Path) -> None:
    delta = filesystem.version_dir(run, 21)
    delta.mkdir()
    (delta / "model.safetensors").touch()
    filesystem.complete(delta, 21, "float32", layout="delta", base=20)
    assert load_evaluation(str(run), local=True).recipe.name == "trained-eval-20"
    with pytest.raises(UsageError, match=r"--step = 21: .* of which 1 are adapters or deltas"):
        load_evaluation(str(run), step=21, local=True)


def test_missing_policy_is_refused_with_a_fix(run: Path) -> None:
    text = r"--step = 17: is not among the published policies .*nearest: 20; or `primeslurm export"
    with pytest.raises(UsageError, match=text):
        load_evaluation(str(run), step=17, local=True)


def test_wrong_arguments_are_usage_errors(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(UsageError, match="--step = 3: applies to runs only"):
        load_evaluation(str(recipe), step=3, local=True)
    with pytest.raises(RunError, match="there is no run"):
        load_evaluation(str(tmp_path / "nothing"), local=True)
    with pytest.raises(UsageError, match=r"nothing\.yaml: cannot be read"):
        load_evaluation(str(tmp_path / "nothing.yaml"), local=True)
    with pytest.raises(UsageError, match="evaluation: task eval needs this section"):
        load_evaluation(str(recipe), overrides=["evaluation=null"], local=True)


def test_evaluation_environments_can_be_overridden(recipe: Path) -> None:
    words = ["evaluation={environments: [{id: reverse-text, examples: 3}]}"]
    loaded = load_evaluation(str(recipe), overrides=words, name="other", local=True)
    assert loaded.recipe.name == "other"
    assert [each.label for each in loaded.recipe.all_environments] == ["reverse-text"]
