"""When a run ends whose environment fails in every rollout, and what it reports.

Head, agents, orchestrator, router and workers are real. Engine and trainer are emulated, as no rollout gets that far.
There is no Slurm: the agents are processes of this machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primeslurm.api.runs.run import Run
from primeslurm.api.sites import local_site, with_python
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive
from primeslurm.plan.stand_ins import emulate
from primeslurm.recipe import Recipe
from primeslurm.records.attempt import EndRecord
from primeslurm.records.events.policy import PolicyCurrent
from primeslurm.records.events.training import EnvironmentFails, RolloutFailed
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events
from tests.support.cli import ROOT, primeslurm
from tests.support.fake_engine import write_tokenizer
from tests.support.recipes import recipe_data
from tests.support.runs import start_local, tails
from tests.support.waiting import wait_until


def with_real_environments(plan: Plan, real: Plan) -> Plan:
    """Return an emulated plan with real environments."""
    workers = {process.name: process for process in real.processes() if process.role == "environment"}
    nodes = [
        node.model_copy(update={"processes": tuple(workers.get(process.name, process) for process in node.processes)})
        for node in plan.nodes
    ]
    return plan.model_copy(update={"nodes": tuple(nodes)})


def finished(place: Path, environments: list[dict[str, Any]]) -> tuple[RunDirectory, EndRecord]:
    """Run these environments, and wait for the end of the run."""
    recipe = Recipe.model_validate(
        recipe_data(
            model={"path": str(write_tokenizer(place / "model"))},
            environments=environments,
            orchestrator={"batch_size": 32, "group_size": 4, "sampling": {"max_tokens": 8}},
            deployment={
                "train": {"nodes": 1, "gpus_per_node": 1},
                "inference": {"type": "multi_node", "gpus_per_node": 1},
            },
        )
    )
    site = with_python(local_site(place / "runs", device_dir=place))
    real = derive(recipe, site, place / "runs" / "r", local=True)
    plan = with_real_environments(emulate(real), real)
    (place / "r.yaml").write_text("# made by a test\n")
    start_local(recipe, plan, place / "r.yaml")
    run = RunDirectory(place / "runs" / "r")
    try:
        return run, wait_until(lambda: run.latest().end(), lambda: tails(run), timeout_s=800)
    finally:
        Run(run.path).cancel()


@pytest.mark.campaign
def test_run_with_a_failing_environment_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests/support/environments")
    run, end = finished(tmp_path, [{"id": "reverse-text"}, {"id": "fails-first-rollout"}])
    why = "environment fails-first-rollout fails every time"
    error = "TaskError: task FailingTask scoring: KeyError: 'unknown-"
    assert end.outcome == "failed" and end.reason.startswith(why) and error in end.reason, end.reason
    assert not end.requeued and end.why_not_requeued == "another attempt would end in the same way"
    happened = events(run)
    served = next(event.time for event in happened if isinstance(event, PolicyCurrent))
    failing = next(event for event in happened if isinstance(event, EnvironmentFails))
    failures = [event for event in happened if isinstance(event, RolloutFailed)]
    print(f"{failing.time - served:.1f} s after the first policy, {end.time - served:.1f} s until the end, {failing}")
    assert len(failures) <= 4 * 32 + 32, "four batches at most, and what ended while that was noticed"
    status = primeslurm("status", run.path, cwd=tmp_path)
    assert why in status.out and error in status.out and "Traceback" not in status.out, status.out
    doctor = primeslurm("doctor", run.path, cwd=tmp_path)
    assert doctor.code == 1
    assert "environment fails-first-rollout" in doctor.out and error in doctor.out, doctor.out
    assert "py-spy" not in doctor.out and "the environment fails every time" in doctor.out
    assert primeslurm("report", run.path, cwd=tmp_path).code == 0
    assert why in (run.path / "report.html").read_text()
    assert json.loads(primeslurm("status", run.path, "--json", cwd=tmp_path).out)["phase"] == "failed"
