"""Parsing of Slurm's output. The texts are from Slurm 22.05, shortened."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from primeslurm.api.submission import require_cluster
from primeslurm.api.testbed import default_directory
from primeslurm.base.errors import ClusterError
from primeslurm.slurm.client import JobComponent, SlurmClient, parse_job, parse_sacct
from primeslurm.slurm.executor import submit, write_pickle
from primeslurm.slurm.render import submitit_folder
from tests.support.slurm_plans import group, plan

HET = """\
JobId=2 HetJobId=1 HetJobOffset=1 HetJobIdSet=1-2 JobName=demo UserId=root(0) Priority=4294901754 JobState=RUNNING \
Reason=None Dependency=(null) Requeue=1 Restarts=1 BatchFlag=0 Reboot=0 ExitCode=0:0 RunTime=00:00:02 \
StartTime=2026-11-21T01:58:10 Partition=gpu ReqNodeList=(null) ExcNodeList=(null) NodeList=demo-n[001-002] NumNodes=2 \
Comment=a JobState=FAKE
JobId=1 HetJobId=1 HetJobOffset=0 HetJobIdSet=1-2 JobName=demo JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0 \
StartTime=2026-11-21T01:58:10 Partition=cpu NodeList=demo-c001 BatchHost=demo-c001
"""
PLAIN = (
    "JobId=7 JobName=x JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=3:0 "
    "StartTime=2026-11-21T01:58:10 Partition=cpu NodeList=(null)"
)


def test_het_job() -> None:
    job = parse_job(HET.replace(" Comment=a JobState=FAKE", ""))
    assert (job.job_id, job.state, job.reason, job.restarts, job.exit_code) == ("1", "RUNNING", "", 1, None)
    assert job.active
    assert job.components == (
        JobComponent("1", 0, "cpu", "RUNNING", "demo-c001"),
        JobComponent("2", 1, "gpu", "RUNNING", "demo-n[001-002]"),
    )


@pytest.mark.parametrize(
    ("leader", "other", "broken_up"),
    [
        ("RUNNING", "RUNNING", False),
        ("PENDING", "PENDING", False),
        ("PENDING", "FAILED", True),
        ("COMPLETING", "COMPLETED", True),
        ("CANCELLED", "CANCELLED", False),
    ],
)
def test_a_job_is_broken_up_if_its_leading_component_goes_on_without_another(
    leader: str, other: str, broken_up: bool
) -> None:
    second, first = HET.replace(" Comment=a JobState=FAKE", "").split("JobId=1 HetJobId")
    second = second.replace("JobState=RUNNING", f"JobState={other}")
    first = "JobId=1 HetJobId" + first.replace("JobState=RUNNING", f"JobState={leader}")
    assert parse_job(second + first).broken_up == broken_up
    assert parse_job(first).broken_up == (leader != "CANCELLED"), "Slurm no longer reports the other component"
    assert parse_job(first.replace("1-2", "1-2,5")).size == 3


def test_a_comment_cannot_pose_as_a_state() -> None:
    assert [component.state for component in parse_job(HET).components] == ["RUNNING", "RUNNING"]


def test_failed_job() -> None:
    job = parse_job(PLAIN)
    assert (job.job_id, job.state, job.reason, job.exit_code) == ("7", "FAILED", "NonZeroExitCode", 3)
    assert not job.active
    assert job.components[0].nodes == ""


def test_an_answer_that_is_no_table_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'n1|idle|broken | twice'\n")
    (tmp_path / "sinfo").chmod(0o755)
    assert [node.reason for node in SlurmClient().nodes()] == ["broken | twice"]
    with pytest.raises(ClusterError, match="sinfo gave an answer that is no table: n1"):
        SlurmClient().partitions()


def test_sacct() -> None:
    job = parse_sacct(
        "12+0|cpu|CANCELLED by 0|None assigned|2026-11-21T01:58:10|0:0\n12+1|gpu|CANCELLED by 0|n[1-2]|x|0:0\n"
    )
    assert job is not None
    assert (job.job_id, job.state, job.source) == ("12", "CANCELLED", "sacct")
    assert job.components == (
        JobComponent("12+0", 0, "cpu", "CANCELLED", ""),
        JobComponent("12+1", 1, "gpu", "CANCELLED", "n[1-2]"),
    )


def test_sacct_knows_nothing() -> None:
    assert parse_sacct("") is None


def test_a_job_for_a_cluster_that_is_gone_is_refused_before_sbatch_waits(tmp_path: Path) -> None:
    conf = str(tmp_path / "slurm.conf")
    with pytest.raises(ClusterError, match="does not exist; is the cluster up"):
        submit(plan(tmp_path, group(0, "train")), lambda: None, tmp_path / "job.sbatch", conf, "w")


def test_pickle_of_an_ended_job_with_the_same_number_is_removed(tmp_path: Path) -> None:
    """A new embedded cluster counts jobs from 1 again."""
    job = plan(tmp_path, group(0, "train"))
    write_pickle(job, lambda: None, "w1")
    ended = submitit_folder(job) / "1_submitted.pkl"
    ended.write_bytes(b"old")
    write_pickle(job, lambda: None, "w2")
    assert {path.name for path in ended.parent.iterdir()} == {"w1.pkl", "w2.pkl"}


def test_resume_says_how_to_start_its_embedded_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    job = plan(tmp_path, group(0, "control"), group(1, "train", 2, gpus=8))
    with pytest.raises(ClusterError, match=r"cluster up --name emulate-x --nodes 2 --control-nodes 1` starts it"):
        require_cluster(job, str(default_directory("emulate-x") / "slurm.conf"))
    with pytest.raises(ClusterError, match=r"is the cluster up\?$"):
        require_cluster(job, str(tmp_path / "slurm.conf"))


def test_words_in_any_encoding_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator who uses latin-1 has drained a node."""
    sinfo = tmp_path / "sinfo"
    sinfo.write_bytes(b"#!/bin/sh\nprintf 'n1|drain|L\\374fter \\377 defekt\\n'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (node,) = SlurmClient().nodes()
    assert (node.name, node.state, node.reason) == ("n1", "drain", "L\ufffdfter \ufffd defekt")


@pytest.mark.parametrize(
    ("squeue", "sacct", "found"),
    [
        ("7|RUNNING|/r/job.sbatch other|\n12+0|PENDING|/r/job.sbatch w|\n12+1|PENDING|/r/job.sbatch w|\n", "", "12"),
        ("3|CANCELLED|/r/job.sbatch w|\n4|RUNNING|/r/job.sbatch w|\n", "", "4"),  # the active job
        ("5|PENDING|/tmp/copy|primeslurm w\n", "", "5"),  # a site's own sbatch copies the script
        ("", "9+0|sbatch --comment=primeslurm w /r/job.sbatch w|\n9+1|sbatch /r/job.sbatch w|\n", "9"),
        ("7|RUNNING|/r/job.sbatch other|\n", "", None),
    ],
)
def test_a_job_is_found_by_the_word_of_its_submission(
    squeue: str, sacct: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("squeue", squeue), ("sacct", sacct)):
        (tmp_path / f"{name}.txt").write_text(text)
        (tmp_path / name).write_text(f"#!/bin/sh\ncat {tmp_path}/{name}.txt\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert SlurmClient().find(" w", 1.0e9) == found


def test_times_are_read_whatever_format_the_user_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\n[ "$SLURM_TIME_FORMAT" != standard ] || echo "{PLAIN} EndTime=2026-11-21T02:58:10"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    job = SlurmClient().job("7")
    assert job is not None and job.ends_at is not None
    assert time.strftime("%Y-%m-%d %H:%M", time.localtime(job.ends_at)) == "2026-11-21 02:58"


@pytest.mark.parametrize(("answer", "seconds"), [("KillWait                = 45 sec", 45.0), ("x = 1", 30.0)])
def test_kill_wait_is_slurms_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, seconds: float) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'KillOnBadExit           = 0'\necho '{answer}'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert SlurmClient().kill_wait_s() == seconds
