"""Every harness that there is: those that can run here play a recorded solution, the others are refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import agents, harness_compatibility, host_needs
from primeslurm.plan.checks.tool_rendering import OWN_HARNESS
from primeslurm.recipe import sandbox_rules
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.testbed.fakes.scripted_engine import ScriptedEngine, tool_call
from tests.support.verifiers_restored import restored
from tests.unit.orchestrator import test_harbor

model = test_harbor.model
SOLUTION = test_harbor.SOLUTION
PLAYED = {
    "bash": [tool_call("bash", command=SOLUTION), "Done."],
    "shell": [tool_call("sh", command=SOLUTION), "Done."],
    "null": ["I have no tools."],
    "chat": ["I have no tools."],
}
"""Beside mini_swe_agent, which test_harbor plays."""


@pytest.fixture(autouse=True)
def _verifiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with restored(monkeypatch):
        yield


@pytest.mark.parametrize("harness", PLAYED)
async def test_it_plays_a_harbor_task_in_a_sandbox(harness: str, model: str, tmp_path: Path) -> None:
    """Whether the model was shown tools is what `check` says beforehand."""
    made, script = test_harbor.recipe(model, harness), PLAYED[harness]
    with ScriptedEngine(Path(model), script) as engine:
        engine.version = 3
        (rollout,) = await test_harbor.played(made, engine, tmp_path)
    has_tools = len(script) > 1
    assert (rollout.info.reward == 1.0) == has_tools
    assert rollout.info.turns == len(engine.requests) == len(script)
    assert ("<tools>" in engine.prompts[0]) == has_tools == sandbox_rules.offers_tools(harness)
    (environment,) = made.environments
    env = environments.load(environment.id, environment.args, agents.agent_options(environment))
    assert harness_compatibility.tool_users(environment, env) == (
        [("environments.harness", harness)] if has_tools else []
    )
    assert not list(tmp_path.rglob("*")), "the rollout left files"


@pytest.mark.parametrize("harness", sorted({*sandbox_rules.HARNESSES} - {*PLAYED, "mini_swe_agent"}))
def test_what_cannot_run_without_more_is_refused_in_words(
    harness: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded with its options, in the container that it gets by itself; there is none here."""
    monkeypatch.setattr("primeslurm.orchestrator.environments.host_needs.shutil.which", lambda name: None)
    made = test_harbor.recipe(model, harness, runtime=None).environments[0]
    env = environments.load(made.id, made.args, agents.agent_options(made))
    (problem,) = host_needs.unmet(made, env)
    assert (problem.value, problem.why) == ("apptainer", "`apptainer` is not installed here")
    offered = [("environments.harness", harness)] if harness not in sandbox_rules.WITHOUT_TOOLS else []
    assert harness_compatibility.tool_users(made, env) == offered


def test_one_whose_packages_have_no_lock_names_what_it_lacks(model: str) -> None:
    made = test_harbor.recipe(model, "terminus_2").environments[0]
    env = environments.load(made.id, made.args, agents.agent_options(made))
    (problem,) = host_needs.unmet(made, env)
    assert problem.field == "environments.harness" and "harbor==0.23.0" in problem.why
    assert "primeslurm install" not in f"{problem.why} {problem.fix}" and "apptainer" in problem.fix
    locks = Path(__file__).parents[3] / "requirements" / "harnesses"
    assert {path.stem for path in locks.glob("*.txt")} == set(host_needs.LOCKED)


def test_harnesses_that_bundled_tasksets_take_by_themselves_are_known_to_check(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"question": "1 + 1?", "answer": "2"}')
    paths = {"harbor-local": str(test_harbor.EXAMPLES), "math-problems": str(problems)}
    for taskset in environments.BUNDLED:
        args = {"path": paths[taskset]} if taskset in paths else {}
        made = Environment(id=taskset, args=args)
        env = environments.load(taskset, args, agents.agent_options(made))
        assert bool(harness_compatibility.tool_users(made, env)) == (taskset in OWN_HARNESS), taskset
