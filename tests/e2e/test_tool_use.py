"""A real RL run with a tool: every rollout has a sandbox, several turns, and commands of the policy."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, turns_on_policy
from tests.support.kept_rollouts import check_tool_use
from tests.support.runs import Demo
from tests.support.unmeasured import unmeasured

pytestmark = [pytest.mark.campaign, pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(1800)]

STEPS = 17


@pytest.fixture(scope="module")
def tool_model() -> Path:
    """Return the model that was trained to call a shell."""
    directory = ROOT / ".primeslurm" / "tool-use"
    subprocess.run(["scripts/warm_start.sh", str(directory)], cwd=ROOT, env=unmeasured(), check=True, timeout=1200)
    return directory / "model"


def test_a_policy_learns_to_use_its_tool(demo: Demo, tool_model: Path) -> None:
    """The run is on-policy and has router replay, so that each step compares engine and trainer."""
    changes = (f"model.path={tool_model}", f"max_steps={STEPS}", "orchestrator.max_off_policy_steps=0")
    run = demo.submit("tool_use_r3.yaml", *(word for change in changes for word in ("--set", change)))
    demo.finish(run)
    table = turns_on_policy(run, STEPS)
    rewards, commands = ([row[name] for row in table] for name in ("reward/mean", "tool-use/commands"))
    # a batch has rollouts of only eight tasks, so average over several
    assert sum(commands[:4]) / 4 > 0.5, "the warm start does not call its tool"
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3, f"rewards {rewards}"
    assert sum(commands[-4:]) / 4 > sum(commands[:4]) / 4 + 0.1, f"commands {commands}"
    assert check_tool_use(run.path, STEPS) > STEPS, "hardly any kept rollout has a command of the chain"
