"""Runs of an ordinary user on a cluster with accounting and a hand-written slurm.conf.

Unlike on the embedded cluster, Slurm sends SIGTERM before a preemption with a grace time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from primeslurm.api.jobs import job_query
from primeslurm.records.attempt import EndRecord
from primeslurm.records.events.training import StepTrained
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import attempt_events
from primeslurm.run.status.run_status import RunStatus, read_status
from tests.cluster.accounting.cluster import AccountingCluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("unmeasured")]


def status(run: RunDirectory) -> RunStatus:
    return read_status(run, job_query(run))


def wait(run: RunDirectory, condition: Callable[[RunStatus], object]) -> RunStatus:
    return wait_until(lambda: now if condition(now := status(run)) else None, lambda: status(run), poll_s=0.3)


def trained(steps: int, attempt: int = 1) -> Callable[[RunStatus], bool]:
    return lambda status: status.phase == "running" and status.attempt == attempt and (status.step or 0) >= steps


def end_of(run: RunDirectory, attempt: int = 1) -> EndRecord:
    end = run.attempt(attempt).end()
    assert end is not None
    return end


def job_of(run: RunDirectory) -> str:
    job = run.latest().job()
    assert job is not None
    return job.job_id


def last_step(run: RunDirectory, attempt: int = 1) -> int:
    """Return the last step that an attempt's trainer has trained."""
    return max(event.step for event in attempt_events(run.attempt(attempt)) if isinstance(event, StepTrained))


@pytest.mark.campaign
def test_preempted_runs_checkpoint_within_the_grace_time_and_come_back(lab: AccountingCluster) -> None:
    """An urgent job preempts two runs. Slurm would requeue one and cancel the other."""
    runs = [lab.submit(lab.site(qos=qos)) for qos in ("scavenger", "expendable")]
    for run in runs:
        wait(run, trained(2))
    urgent = lab.hold(nodes=3)
    for run in runs:
        wait(run, lambda status: status.phase == "requeued")
        end = end_of(run)
        assert (end.outcome, end.requeued) == ("preempted", True)
        assert end.reason.startswith("preempted: Slurm gives the job until ")
        assert end.committed_step == last_step(run), "a step was trained that no checkpoint has"
    scavenger, expendable = runs
    for job_id in (urgent, job_of(expendable)):
        lab.client.cancel(job_id)
    committed = end_of(scavenger).committed_step
    assert committed is not None
    wait(scavenger, trained(committed + 1, attempt=2))

    lab.as_user("scancel", job_of(scavenger))
    ended = wait(scavenger, lambda status: status.phase == "cancelled")
    assert ended.committed_step == last_step(scavenger, 2) > committed
    assert not end_of(scavenger, 2).requeued


@pytest.mark.campaign
def test_preemption_without_grace_time_is_not_a_cancellation(lab: AccountingCluster) -> None:
    run = lab.submit(lab.site(qos="sudden"))
    wait(run, trained(2))
    urgent = lab.hold(nodes=3)
    wait(run, lambda status: status.phase == "requeued")
    end = end_of(run)
    assert (end.outcome, end.reason, end.requeued) == ("preempted", "Slurm requeued the job", True)
    assert end.committed_step == last_step(run)
    assert "cancel" not in lab.primeslurm("doctor", run.path).stdout.lower()
    for job_id in (urgent, job_of(run)):
        lab.client.cancel(job_id)


@pytest.mark.parametrize(
    ("slurm", "code", "words"),
    [
        ({"account": "lab9"}, 2, "slurm.account = lab9: this user has no such account (did you mean lab7?)"),
        ({"qos": "urgent"}, 2, "slurm.qos = urgent: account lab7 may not use this QOS"),
        ({"qos": "small"}, 2, "slurm.qos = small: allows gres/gpu=1 for a job, but the recipe requests 2"),
        ({"qos": "narrow"}, 2, "slurm.qos = narrow: allows gres/gpu=1 for a user, but the recipe requests 2"),
        ({"time": "04:30:00"}, 2, "slurm.time = 04:30:00: partition gpu allows 04:00:00"),
        # Only sbatch counts this user's waiting jobs. By then Slurm has created components, and cancels them.
        ({"qos": "few"}, 3, "sbatch refused the job: sbatch: error: "),
    ],
)
def test_job_refused_by_accounting_leaves_no_files(
    lab: AccountingCluster, slurm: dict[str, str], code: int, words: str
) -> None:
    before, jobs = set(lab.runs.iterdir()), lab.client.job_ids()
    recipe, site = lab.recipe(name="refused"), lab.site(**slurm)
    refused = lab.primeslurm("submit", recipe, "--emulate", "--site", site)
    assert refused.returncode == code and words in refused.stderr, refused
    assert code != 3 or "Job violates accounting/QOS policy" in refused.stderr
    assert set(lab.runs.iterdir()) == before and set(lab.client.job_ids()) <= set(jobs)


def test_check_names_a_limit_of_the_qos(lab: AccountingCluster) -> None:
    recipe = lab.recipe(environments=[{"id": "reverse-text"}])
    checked = lab.primeslurm("check", recipe, "--site", lab.site(qos="small"))
    assert checked.returncode == 2, checked
    assert "slurm.qos = small: allows gres/gpu=1 for a job, but the recipe requests 2" in checked.stderr


def test_status_names_a_limit_lowered_after_submission(lab: AccountingCluster) -> None:
    """Slurm keeps such a job waiting. Without this message its user would wait forever."""

    def limit(gpus: int) -> None:
        lab.as_root(
            "sacctmgr", "--immediate", "--quiet", "modify", "qos", "narrow", "set", f"MaxTRESPerUser=gres/gpu={gpus}"
        )

    limit(2)
    try:
        run = lab.submit(lab.site(qos="narrow", extra=["--hold"]))
        limit(0)
        for component in lab.client.job(job_of(run)).components:  # type: ignore[union-attr]
            lab.as_root("scontrol", "release", component.job_id)
        waiting = wait(run, lambda status: "QOSMaxGRESPerUser" in status.reason)
        assert waiting.phase == "pending"
        shown = lab.primeslurm("status", run.path)
        assert "cannot start" in shown.stdout and "QOSMaxGRESPerUser" in shown.stdout, shown
        lab.client.cancel(job_of(run))
    finally:
        limit(1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--partition=short", "--time=01:00:00"), "PartitionTimeLimit"),
        (("--qos=narrow", "--gres=gpu:h100:2"), "QOSMaxGRESPerUser"),
    ],
)
def test_job_that_cannot_start_shows_a_reason(lab: AccountingCluster, options: tuple[str, ...], reason: str) -> None:
    """Slurm accepts such a job, and it would wait forever without a message."""
    submitted = lab.as_user("sbatch", "--parsable", "--account=lab7", *options, "--wrap=true")
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    try:
        wait_until(lambda: (job := lab.client.job(job_id)) and job.reason == reason, lambda: lab.client.job(job_id))
        assert (job := lab.client.job(job_id)) is not None and job.state == "PENDING"
    finally:
        lab.client.cancel(job_id)
