"""Variables of the calling shell's allocation reach neither Slurm's commands nor the job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.environment import clean, inherited_by_jobs
from primeslurm.slurm.executor import submit
from tests.support.slurm_plans import group, plan

FOREIGN = {
    "SLURM_JOB_ID": "5",
    "SLURM_CPUS_PER_TASK": "3",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_RESTART_COUNT": "3",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_CLUSTERS": "other",
    "SLURM_TIME_FORMAT": "relative",
    "SLURMD_NODENAME": "n1",
    "SRUN_CPUS_PER_TASK": "32",
    "SBATCH_PARTITION": "debug",
    "SALLOC_PARTITION": "debug",
    "SINFO_PARTITION": "debug",
    "SQUEUE_FORMAT": "%i",
    "SACCT_FORMAT": "JobID",
    "SCANCEL_INTERACTIVE": "1",
    "PMIX_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "8",
    "PMI_RANK": "1",
    "PRIMESLURM_NODES": "n1,n2",
    "_SLURM_SPANK_OPTION_pyxis_container_image": "ubuntu",
    "MV2_COMM_WORLD_RANK": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OWN = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "token", "WANDB_API_KEY": "k", "MY_SLURM_ID": "1"}


def test_variables_of_the_shells_allocation_are_removed() -> None:
    assert clean(FOREIGN | OWN) == OWN
    assert clean(FOREIGN | OWN, "/other.conf") == OWN | {"SLURM_CONF": "/other.conf"}


def test_a_job_does_not_inherit_the_gpus_of_the_shell() -> None:
    assert inherited_by_jobs(["CUDA_VISIBLE_DEVICES", "SLURM_GPUS", "PATH"]) == ["CUDA_VISIBLE_DEVICES", "SLURM_GPUS"]
    assert "CUDA_VISIBLE_DEVICES" in clean({"CUDA_VISIBLE_DEVICES": "0"}), "a local run uses the GPUs of its shell"


def test_slurm_commands_do_not_inherit_allocation_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "squeue").write_text("#!/bin/sh\nenv | cut -d= -f1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    seen = set(SlurmClient().job_ids())
    assert "PATH" in seen
    assert seen & FOREIGN.keys() == {"SLURM_TIME_FORMAT"}, "the client sets its own"


def test_job_does_not_inherit_allocation_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (FOREIGN | OWN).items():
        monkeypatch.setenv(name, value)
    conf = tmp_path / "slurm.conf"
    conf.touch()
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\necho Submitted batch job 5\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    given = plan(tmp_path / "run", group(0, "train"))
    assert submit(given, print, tmp_path / "job.sbatch", str(conf), "word") == "5"
    lines = (tmp_path / "environment").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines if "=" in line)
    assert not seen.keys() & FOREIGN.keys()
    assert seen["SLURM_CONF"] == str(conf)
    assert {name: seen[name] for name in ("SLURM_JWT", "WANDB_API_KEY", "MY_SLURM_ID")}.items() <= OWN.items()
    assert set(os.environ) >= FOREIGN.keys(), "this process keeps its own"
