"""Every environment of a shipped recipe loads and has tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import checks, probe
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.sandboxes import sees_packages
from primeslurm.recipe.sections.trainer import Model
from scripts.models import tiny_model

ROOT = Path(__file__).resolve().parents[3]
NAMED = [
    pytest.param(environment, id=f"{path.stem}-{environment.label}")
    for path in sorted((ROOT / "recipes").glob("*.yaml"))
    for environment in load_recipe(path).environments
]


@pytest.mark.parametrize("environment", NAMED)
def test_environment_of_a_recipe_loads(environment: Environment, tmp_path: Path) -> None:
    # Paths of the cluster are replaced by files of the same form.
    dapo = tmp_path / "dapo.parquet"
    row = {"prompt": "In triangle ABC, ...", "solution": "34"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), dapo)
    stand_ins = {
        "/shared/data/dapo/en/train-00000-of-00001.parquet": str(dapo),
        "/shared/data/swe": str(ROOT / "examples" / "harbor"),
    }
    args = {name: stand_ins.get(str(value), value) for name, value in environment.args.items()}
    env = environments.load(environment.id, args, environments.agent_options(environment))
    task = next(iter(env.taskset))
    assert task.data.prompt
    assert checks.without_reward(environment, env, task) == []
    assert checks.notes(environment, env) == [], "rollouts download their harness"


@pytest.mark.parametrize(("module", "rewarded"), [("broken-tool", False), ("fine-words", True)])
def test_environment_without_reward_is_noted(module: str, rewarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "support" / "environments")
    answer = probe.probe(Environment.model_validate({"id": module}))
    assert answer.violations == [] and [note.value for note in answer.notes] == ([] if rewarded else [module])


def test_prompts_that_leave_no_room_for_an_answer_are_counted(tmp_path: Path) -> None:
    tiny_model.tokenizer().save_pretrained(tmp_path)
    problems = [{"question": question, "answer": "2"} for question in ("1 + 1?", "1 + 1? " * 200, "1 + 1? " * 100)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, problems)))
    args = {"path": str(tmp_path / "data.jsonl")}
    environment = Environment.model_validate({"id": "math-problems", "args": args})
    answer = probe.probe(environment, Model(path=str(tmp_path)), max_len=256)
    assert answer.tasks == 3 and not answer.violations
    (warning,) = answer.warnings
    assert warning.why.startswith("2 of 3 prompts leave no room for an answer: the prompt of task 2 has ")
    assert probe.probe(environment, Model(path=str(tmp_path)), max_len=8192).warnings == []
    assert probe.probe(environment, Model(path="no-model"), max_len=256).warnings == []


def test_recipes_name_the_command_that_installs_their_harness() -> None:
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        for environment in load_recipe(path).environments:
            if environment.harness is not None and sees_packages(environment.runtime):
                assert f"`primeslurm install --harness {environment.harness.id}`" in path.read_text(), path.name
                assert (ROOT / "requirements" / "harnesses" / f"{environment.harness.id}.txt").is_file()


def test_environments_of_recipes_are_documented_and_their_packages_locked() -> None:
    page = (ROOT / "docs" / "how-to" / "environments.md").read_text()
    assert {f"`{environment.values[0].id}`" for environment in NAMED} <= set(page.split())
    head = (ROOT / "examples" / "textarena.yaml").read_text()
    pins = [word for word in head.split() if "==" in word]
    lock = (ROOT / "requirements" / "games.txt").read_text().splitlines()
    assert pins and {line for line in lock if not line.startswith("#")} == set(pins), (
        "`primeslurm install --games` installs something else"
    )


def test_models_of_demo_recipes_have_a_warm_start() -> None:
    warm_starts = set(re.findall(r"^  ([a-z-]+)\)$", (ROOT / "scripts" / "warm_start.sh").read_text(), re.MULTILINE))
    texts = [path.read_text() for folder in ("recipes", "examples") for path in sorted((ROOT / folder).glob("*.yaml"))]
    named = {name for text in texts for name in re.findall(r"path: \.primeslurm/([a-z-]+)/model", text)}
    assert named and named <= warm_starts
