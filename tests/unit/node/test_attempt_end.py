"""The end of an attempt: whether another one follows."""

from __future__ import annotations

from pathlib import Path

from primeslurm.node.attempt.attempt_end import conclude
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.records.journal import Journal
from primeslurm.run.directory import RunDirectory
from primeslurm.wire.stored import checkpoints
from tests.support.plans import plan_of


def test_a_run_ends_after_three_attempts_that_committed_nothing_new_and_not_after_two(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "r", (), max_attempts=9)
    run = RunDirectory(Path(plan.run_dir))
    directory = checkpoints.step_dir(run.path, 38)
    directory.mkdir(parents=True)
    checkpoints.commit(directory, 38, 1)
    requeued = []
    for number in range(1, 5):  # the first of them has committed step 38
        attempt = run.attempt(number)
        attempt.prepare(plan)
        ending = Ending(Outcome.FAILED, "a trainer rank was killed", "trainer-rank-0")
        requeued.append(conclude(plan, run, attempt, ending, Journal(attempt.path, "head")))
    assert requeued == [True, True, True, False]
