"""A real run whose environments have their own advantage rules, interrupted twice."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from primeslurm.records.metrics import Row
from primeslurm.run.history import rows
from tests.e2e.conftest import ROOT
from tests.support.faults import warn
from tests.support.hinted import write_model
from tests.support.runs import Demo, process, trained_steps

pytestmark = [pytest.mark.campaign, pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(1800)]

STEPS = 12
REWARDS = ("hinted/reward", "duel/reward", "relay/proposer/reward", "relay/solver/reward")
MEANS = ("memory/duel/short", "memory/duel/long")


def test_hint_is_learned_and_running_means_survive_interruptions(
    demo: Demo, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy learns to do without its hint, and the running means of each agent survive both interruptions."""
    write_model(model, tmp_path / "model")
    places = (str(ROOT / "tests" / "support" / "environments"), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    run = demo.submit("../tests/data/three_rules.yaml", "--set", f"model.path={tmp_path / 'model'}")
    before = demo.wait(run, lambda status: (status["committed_step"] or 0) >= 6)
    os.kill(process(before, "trainer-rank-0")["pid"], signal.SIGKILL)
    demo.wait(run, lambda status: status["attempt"] == 2)
    killed = run.attempt(1).end()
    assert killed is not None and killed.committed_step is not None and killed.committed_step >= 6

    # not a multiple of three, at which steps are committed anyway
    status = demo.wait(run, lambda status: (status["metrics"].get("step") or 0) >= killed.committed_step + 2)
    warn(demo.slurm_conf, status["job_id"])
    demo.wait(run, lambda status: status["attempt"] == 3)
    preempted = run.attempt(2).end()
    assert preempted is not None and preempted.outcome == "preempted"
    assert preempted.committed_step is not None and preempted.committed_step >= killed.committed_step + 2

    demo.finish(run)
    steps = trained_steps(run)
    second = list(range(killed.committed_step + 1, preempted.committed_step + 1))
    assert [step for attempt, step in steps if attempt == 2] == second, "a preemption lost or repeated a step"
    assert [step for attempt, step in steps if attempt == 3] == list(range(second[-1] + 1, STEPS + 1))
    check_rules(rows(run.path))


def check_rules(table: list[Row]) -> None:
    """Check that every rule has had its effect, from the first step to the last."""
    assert [row["step"] for row in table] == list(range(1, STEPS + 1))
    first, second_half = table[0], table[STEPS // 2 :]
    # It grows again when the other environments have learned nearly everything, because one policy learns from all.
    distances = [row["teacher/kl"] for row in table[3:8]]
    assert sum(distances) / len(distances) < 0.7 * first["teacher/kl"], table
    later = {name: sum(row[name] for row in second_half) / len(second_half) for name in REWARDS}
    for name in REWARDS:
        assert later[name] > first[name] + 0.1, f"{name}: {first[name]:.3f} -> {later[name]:.3f}"
    for name in MEANS:
        means = [row[name] for row in table]
        # Up to 17 plays per step keep 0.7 of a mean. A mean that was reset would be that of one step.
        assert all(now > 0.7 * then for then, now in itertools.pairwise(means)), f"{name}: {means}"
        assert means[8] > 2 * means[0], f"{name}: {means}"
