"""A trainer that dies after its last commit, with real agents, a real head and a real orchestrator."""

from __future__ import annotations

from pathlib import Path

from primeslurm.api.runs.run import Run
from primeslurm.api.sites import local_site, with_python
from primeslurm.plan.model import Plan, Process
from primeslurm.plan.planner import derive
from primeslurm.plan.stand_ins import emulate
from primeslurm.recipe import Recipe
from primeslurm.records.events.processes import ProcessExited
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events, rows
from tests.support.fake_engine import write_tokenizer
from tests.support.recipes import recipe_data
from tests.support.runs import start_local, tails
from tests.support.waiting import wait_until

KILLED_AT_EXIT = """
import os, signal
from primeslurm.testbed.emulated.trainer import main
if main() == 0: os.kill(os.getpid(), signal.SIGKILL)
"""


def with_trainers_that_die_at_exit(plan: Plan) -> Plan:
    def replaced(process: Process) -> Process:
        if process.role != "trainer":
            return process
        place = process.argv.index("-m")
        argv = (*process.argv[:place], "-c", KILLED_AT_EXIT, *process.argv[place + 2 :])
        return process.model_copy(update={"argv": argv, "imports": ()})

    nodes = [node.model_copy(update={"processes": tuple(map(replaced, node.processes))}) for node in plan.nodes]
    return plan.model_copy(update={"nodes": tuple(nodes)})


def test_run_whose_trainer_dies_after_the_last_commit_completes(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        recipe_data(
            model={"path": str(write_tokenizer(tmp_path / "model"))},
            max_steps=2,
            orchestrator={"batch_size": 8, "group_size": 4, "sampling": {"max_tokens": 8}},
            deployment={
                "train": {"nodes": 1, "gpus_per_node": 1},
                "inference": {"type": "multi_node", "gpus_per_node": 1},
            },
        )
    )
    site = with_python(local_site(tmp_path / "runs", device_dir=tmp_path))
    plan = emulate(derive(recipe, site, tmp_path / "runs" / "r", local=True))
    (tmp_path / "r.yaml").write_text("# made by a test\n")
    start_local(recipe, with_trainers_that_die_at_exit(plan), tmp_path / "r.yaml")
    run = RunDirectory(tmp_path / "runs" / "r")
    try:
        end = wait_until(lambda: run.latest().end(), lambda: tails(run), timeout_s=800)
    finally:
        Run(run.path).cancel()
    assert (end.outcome, len(run.attempts()), len(rows(run.path))) == ("completed", 1, 2)
    assert [e.code for e in events(run) if isinstance(e, ProcessExited) and e.name == "trainer-rank-0"] == [-9]
