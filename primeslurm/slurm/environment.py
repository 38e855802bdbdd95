"""The environment of Slurm's commands and jobs, without what the calling shell's own allocation left in it.

Slurm's commands read options from variables (`SBATCH_PARTITION`, `SINFO_FORMAT`), and `srun` inside a job reads the
variables of that job (`SLURM_MEM_PER_NODE`, `SRUN_CPUS_PER_TASK`). A shell inside `salloc` or a batch job has many of
them. `sbatch` hands all of them to the new job, where they contradict what the plan asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
