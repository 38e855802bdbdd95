"""Environment of Slurm's commands and jobs, without variables of the caller's allocation.

Slurm's commands read options from variables (`SBATCH_PARTITION`, `SINFO_FORMAT`), and `srun` inside a job reads the
variables of that job (`SLURM_MEM_PER_NODE`, `SRUN_CPUS_PER_TASK`). A shell inside `salloc` or a batch job has many of
them. `sbatch` passes all of them to the new job, where they contradict the requests of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from primeslurm.base.hostlists import expand

_PREFIXES = (
    *("SLURM_", "SLURMD_", "SLURMCTLD_", "SRUN_", "SBATCH_", "SALLOC_", "SATTACH_", "SCRONTAB_"),
    *("SINFO_", "SQUEUE_", "SACCT_", "SACCTMGR_", "SCANCEL_", "SCONTROL_", "SPRIO_", "SSHARE_", "SSTAT_", "SREPORT_"),
    # salloc passes options of plug-ins (pyxis: --container-image) to every srun in this form.
    *("_SLURM_", "SPANK_"),
    # With these, libraries behave as a rank of the shell's MPI program.
    # OMPI_MCA_* are a user's choices, for example of a network.
    *("PMI_", "PMI2_", "PMIX_", "OMPI_COMM_", "OMPI_UNIVERSE_", "OMPI_APP_", "OMPI_FIRST_RANKS", "OMPI_NUM_APP"),
    *("OMPI_MCA_ess", "OMPI_MCA_orte", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MV2_COMM_WORLD_"),
    "TORCHELASTIC_",  # of a shell below torchrun: torch would not make the stores of the job's process groups
    # submitit and the agents describe the shell's job with these.
    *("SUBMITIT_", "PRIMESLURM_NODES"),
)
# Start and end of the shell's allocation, which a run without Slurm needs
ALLOCATION_TIMES = ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME")
# Cluster and credentials of the user. Not SLURM_CLUSTERS: the site file names the cluster (`slurm_conf`).
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_JWKS"})
# GPUs of the shell's allocation. Slurm sets them for a job only if the job requests GPUs as a generic resource.
_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"})


def inherited(names: Iterable[str]) -> list[str]:
    """Return the sorted names of variables that belong to the caller's allocation or habits."""
    return sorted(name for name in names if name.startswith(_PREFIXES) and name not in _KEPT)


def inherited_by_jobs(names: Iterable[str]) -> list[str]:
    """Return the sorted names of variables that a new job must not inherit: `inherited`, and those that select GPUs."""
    return sorted({*inherited(names), *_DEVICES.intersection(names)})


def clean(environ: Mapping[str, str], slurm_conf: str | None = None) -> dict[str, str]:
    """Return an environment for a Slurm command, without the variables of the allocation that this shell may be in.

    `slurm_conf` replaces the one of `environ`.
    """
    foreign = set(inherited(environ))
    environment = {name: value for name, value in environ.items() if name not in foreign}
    return environment if slurm_conf is None else environment | {"SLURM_CONF": slurm_conf}


def gpus_given(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs that this shell may use, as in CUDA_VISIBLE_DEVICES; None if it may use all of them."""
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
    value = next((environ[name] for name in names if name in environ), None)
    if value is None:
        return None
    return tuple(part.strip() for part in value.split(",") if part.strip() not in ("", "NoDevFiles"))


def memory_given_mib(environ: Mapping[str, str], cpus: int) -> int | None:
    """Return the memory of this shell's job on the node [MiB]; None if the environment does not say."""
    if per_node := _number(environ.get("SLURM_MEM_PER_NODE")):  # 0 means all of it
        return per_node
    per_cpu = _number(environ.get("SLURM_MEM_PER_CPU"))
    return per_cpu * cpus if per_cpu else None


def cpus_given(environ: Mapping[str, str]) -> int | None:
    """Return the CPU cores of this shell's job on the node; None if the environment does not say."""
    return _number(environ.get("SLURM_CPUS_ON_NODE"))


def is_started_by_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm started this process on a node: in a step, a batch script or an interactive shell."""
    return "SLURMD_NODENAME" in environ


def allocated_elsewhere(environ: Mapping[str, str], host: str) -> list[str]:
    """Return the nodes of this shell's allocation if `host` is not one of them, as after `salloc` on a login node."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes or is_started_by_slurm(environ):
        return []
    try:
        names = expand(nodes)
    except ValueError:
        return []
    return [] if host.partition(".")[0] in names else names


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
