"""How often engines that cannot start are retried, and what is reported, with real agents and a real head.

There is no Slurm: the agents are processes of this machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from primeslurm.api.runs.run import Run
from primeslurm.api.sites import local_site, with_python
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive
from primeslurm.plan.stand_ins import emulate
from primeslurm.plan.supervision import MAX_RESTARTS
from primeslurm.recipe import Recipe
from primeslurm.records.events.processes import ProcessStarted
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import attempt_events
from tests.support.cli import primeslurm
from tests.support.fake_engine import write_tokenizer
from tests.support.recipes import recipe_data
from tests.support.runs import start_local
from tests.support.waiting import wait_until

ERROR = "ValueError: max_model_len 131072 is larger than 40960"


def with_engines_that_fail(plan: Plan) -> Plan:
    """Return a plan whose engines end at once."""
    argv = (sys.executable, "-c", f"raise ValueError({ERROR.removeprefix('ValueError: ')!r})")
    nodes = [
        node.model_copy(
            update={
                "processes": tuple(
                    process.model_copy(update={"argv": argv}) if process.role == "engine" else process
                    for process in node.processes
                )
            }
        )
        for node in plan.nodes
    ]
    return plan.model_copy(update={"nodes": tuple(nodes)})


@pytest.mark.campaign
def test_run_with_failing_engines_ends_after_two_attempts(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        recipe_data(
            model={"path": str(write_tokenizer(tmp_path / "model"))},
            deployment={
                "train": {"nodes": 1, "gpus_per_node": 1},
                "inference": {"type": "multi_node", "gpus_per_node": 1},
            },
        )
    )
    site = with_python(local_site(tmp_path / "runs", device_dir=tmp_path))
    plan = with_engines_that_fail(emulate(derive(recipe, site, tmp_path / "runs" / "r", local=True)))
    (tmp_path / "r.yaml").write_text("# made by a test\n")
    start_local(recipe, plan, tmp_path / "r.yaml")
    run = RunDirectory(tmp_path / "runs" / "r")
    try:
        wait_until(lambda: (end := run.latest().end()) and not end.requeued, timeout_s=800)
    finally:
        Run(run.path).cancel()
    assert [attempt.number for attempt in run.attempts()] == [1, 2]
    for attempt in run.attempts():
        starts = [event for event in attempt_events(attempt) if isinstance(event, ProcessStarted)]
        engine_starts = [event for event in starts if event.name.startswith("engine")]
        assert len(engine_starts) <= MAX_RESTARTS, "further ones may begin until the head has seen two fail"
    status = json.loads(primeslurm("status", run.path, "--json", cwd=tmp_path).out)
    assert status["phase"] == "failed"
    same_error = "; the attempt before ended with the same error, and neither made progress"
    assert ERROR in status["reason"] and status["reason"].endswith(same_error)
    assert ERROR in primeslurm("doctor", run.path, cwd=tmp_path).out
