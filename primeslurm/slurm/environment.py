"""The environment of Slurm's commands and jobs, without what the calling shell's own allocation left in it.

Slurm's commands read options from variables (`SBATCH_PARTITION`, `SINFO_FORMAT`), and `srun` inside a job reads the
variables of that job (`SLURM_MEM_PER_NODE`, `SRUN_CPUS_PER_TASK`). A shell inside `salloc` or a batch job has many of
them. `sbatch` hands all of them to the new job, where they contradict what the plan asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from primeslurm.base.hostlists import expand

_PREFIXES = (
    *("SLURM_", "SLURMD_", "SLURMCTLD_", "SRUN_", "SBATCH_", "SALLOC_", "SATTACH_", "SCRONTAB_"),
    *("SINFO_", "SQUEUE_", "SACCT_", "SACCTMGR_", "SCANCEL_", "SCONTROL_", "SPRIO_", "SSHARE_", "SSTAT_", "SREPORT_"),
    # salloc hands the options of plug-ins (pyxis: --container-image) to every srun below it in this form.
    *("_SLURM_", "SPANK_"),
    # Libraries that find these believe that they are a rank of the MPI program that the shell belongs to.
    # OMPI_MCA_* are a user's choices, for example of a network.
    *("PMI_", "PMI2_", "PMIX_", "OMPI_COMM_", "OMPI_UNIVERSE_", "OMPI_APP_", "OMPI_FIRST_RANKS", "OMPI_NUM_APP"),
    *("OMPI_MCA_ess", "OMPI_MCA_orte", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MV2_COMM_WORLD_"),
    "TORCHELASTIC_",  # of a shell below torchrun: torch would not make the stores of the job's process groups
    # How submitit and an agent describe the job that the shell belongs to.
    *("SUBMITIT_", "PRIMESLURM_NODES"),
)
ALLOCATION_TIMES = ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME")
"""When the allocation of a shell began, and when it ends. A run without Slurm inside it needs to know."""
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_JWKS"})
"""Where the cluster is, and who the user is. Not SLURM_CLUSTERS: the site file names the cluster (`slurm_conf`)."""
_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"})
"""GPUs of the shell's allocation. Slurm sets them for a job only if the job asks for GPUs as a generic resource."""


def inherited(names: Iterable[str]) -> list[str]:
    """Return the names of variables that belong to the caller's allocation or to a user's habits, sorted."""
    return sorted(name for name in names if name.startswith(_PREFIXES) and name not in _KEPT)


def inherited_by_jobs(names: Iterable[str]) -> list[str]:
    """Return the names of variables that a new job must not inherit: `inherited`, and those that choose GPUs."""
    return sorted({*inherited(names), *_DEVICES.intersection(names)})


def clean(environ: Mapping[str, str], slurm_conf: str | None = None) -> dict[str, str]:
    """Return an environment for a command of Slurm.

    Args:
        environ: of this process.
        slurm_conf: path of the cluster's slurm.conf; None for the one that `environ` names, or the system's own.
    """
    foreign = set(inherited(environ))
    found = {name: value for name, value in environ.items() if name not in foreign}
    return found if slurm_conf is None else found | {"SLURM_CONF": slurm_conf}


def gpus_given(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs that this shell may use, as CUDA_VISIBLE_DEVICES names them.

    Args:
        environ: of the shell.

    Returns:
        None if the environment does not say, so that all of the machine's GPUs may be used.
    """
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
    value = next((environ[name] for name in names if name in environ), None)
    if value is None:
        return None
    return tuple(part.strip() for part in value.split(",") if part.strip() not in ("", "NoDevFiles"))


def memory_given_mib(environ: Mapping[str, str], cpus: int) -> int | None:
    """Return how much memory Slurm gives this shell's job on the node, in MiB; None if the environment does not say."""
    if per_node := _number(environ.get("SLURM_MEM_PER_NODE")):  # 0 means all of it
        return per_node
    per_cpu = _number(environ.get("SLURM_MEM_PER_CPU"))
    return per_cpu * cpus if per_cpu else None


def cpus_given(environ: Mapping[str, str]) -> int | None:
    """Return how many CPU cores Slurm gives this shell on the node; None if the environment does not say."""
    return _number(environ.get("SLURM_CPUS_ON_NODE"))


def is_started_by_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm started this process on a node: in a step, a batch script or an interactive shell there."""
    return "SLURMD_NODENAME" in environ


def allocated_elsewhere(environ: Mapping[str, str], host: str) -> list[str]:
    """Return the nodes of this shell's allocation if the shell is on none of them, as after `salloc` on a login node.

    Args:
        environ: of the shell.
        host: name of this machine.
    """
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
