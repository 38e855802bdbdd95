"""All harnesses: some play a recorded solution in a sandbox, the others are refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import checks
from primeslurm.plan.checks.tool_rendering import OWN_HARNESS
from primeslurm.recipe.rules import sandboxes
from primeslurm.recipe.sections.orchestrator import Environment
from tests.support.scripted_engine import ScriptedEngine, tool_call
from tests.support.verifiers_restored import restored
from tests.unit.orchestrator import test_harbor

model = test_harbor.model
SOLUTION = test_harbor.SOLUTION
SCRIPTS = {
    "bash": [tool_call("bash", command=SOLUTION), "Done."],
    "shell": [tool_call("sh", command=SOLUTION), "Done."],
    "null": ["I have no tools."],
    "chat": ["I have no tools."],
}
"""Replies of the model by harness. test_harbor has one for mini_swe_agent."""


@pytest.fixture(autouse=True)
def _verifiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with restored(monkeypatch):
        yield


@pytest.mark.parametrize("harness", SCRIPTS)
async def test_harness_plays_a_task_in_a_sandbox_with_the_tools_that_check_expects(
    harness: str, model: str, tmp_path: Path
) -> None:
    made, script = test_harbor.recipe(model, harness), SCRIPTS[harness]
    with ScriptedEngine(Path(model), script) as engine:
        engine.version = 3
        (rollout,) = await test_harbor.played(made, engine, tmp_path)
    has_tools = len(script) > 1
    assert (rollout.info.reward == 1.0) == has_tools
    assert rollout.info.turns == len(engine.requests) == len(script)
    assert ("<tools>" in engine.prompts[0]) == has_tools == sandboxes.offers_tools(harness)
    (environment,) = made.environments
    users = checks.tool_users(environment, environments.load_from_recipe(environment))
    assert users == ([("environments.harness", harness)] if has_tools else [])
    assert not list(tmp_path.rglob("*")), "the rollout left files"


@pytest.mark.parametrize("harness", sorted({*sandboxes.HARNESSES} - {*SCRIPTS, "mini_swe_agent"}))
def test_harness_that_needs_a_container_is_refused_without_one(
    harness: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primeslurm.orchestrator.environments.checks.shutil.which", lambda name: None)
    made = test_harbor.recipe(model, harness, runtime=None).environments[0]
    env = environments.load_from_recipe(made)
    (problem,) = checks.missing_needs(made, env)
    assert (problem.value, problem.why) == ("apptainer", "`apptainer` is not installed here")
    offered = [("environments.harness", harness)] if harness not in sandboxes.WITHOUT_TOOLS else []
    assert checks.tool_users(made, env) == offered


def test_missing_packages_of_a_harness_without_lock_are_named(model: str) -> None:
    made = test_harbor.recipe(model, "terminus_2").environments[0]
    (problem,) = checks.missing_needs(made, environments.load_from_recipe(made))
    assert problem.field == "environments.harness" and "harbor==0.23.0" in problem.why
    assert "primeslurm install" not in f"{problem.why} {problem.fix}" and "apptainer" in problem.fix
    locks = Path(__file__).parents[3] / "requirements" / "harnesses"
    assert {path.stem for path in locks.glob("*.txt")} == set(checks.LOCKED)


def test_plan_knows_which_bundled_tasksets_have_a_harness_with_tools(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"question": "1 + 1?", "answer": "2"}')
    paths = {"harbor-local": str(test_harbor.EXAMPLES), "math-problems": str(problems)}
    for taskset in environments.BUNDLED:
        made = Environment(id=taskset, args={"path": paths[taskset]} if taskset in paths else {})
        users = checks.tool_users(made, environments.load_from_recipe(made))
        assert bool(users) == (taskset in OWN_HARNESS), taskset
