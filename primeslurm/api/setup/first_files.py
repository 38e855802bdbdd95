"""Write the first files of a new user: a site file for the cluster, and a recipe that fits on it."""

from __future__ import annotations

import importlib.util
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from primeslurm.api.setup.proposal import Proposal, propose
from primeslurm.api.setup.ready_recipes import write_new
from primeslurm.api.sites import local_site
from primeslurm.api.testbed import Cluster
from primeslurm.base import files
from primeslurm.base.errors import ClusterError, UsageError, Violation
from primeslurm.base.paths import REPOSITORY, is_dir
from primeslurm.base.templating import environment
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.cluster_fit import cluster_facts

# Ready recipe by number of GPUs per node. The last one is also for more GPUs.
FIRST_RECIPES = {0: "smollm2_arithmetic_cpu", 1: "smollm2_arithmetic_one_gpu", 2: "smollm2_arithmetic"}
# Time limit of the first run, if the partition allows it.
FIRST_RUN_MINUTES = 60
# Types of network file systems in /proc/mounts.
_SHARED = frozenset(
    [
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "wekafs", "panfs", "pvfs2", "orangefs"),
        *("fuse.juicefs", "fuse.glusterfs", "glusterfs", "cifs", "smb3", "afs", "quobyte", "fuse.quobyte"),
    ]
)
# Variables that clusters set to a user's directory on a shared file system.
_WORK = ("SCRATCH", "WORK", "PROJECT", "PROJECTS", "WORKDIR")


@dataclass(frozen=True)
class FirstFiles:
    """Paths of the files, and the facts they are based on."""

    recipe: Path
    site: Path | None
    """None: there is no Slurm with GPUs here, and the recipe runs with `--local`."""
    proposal: Proposal | None
    why_local: str = ""
    """Reason why there is no site file."""
    embedded: str = ""
    """Name of the embedded cluster that `SLURM_CONF` belongs to; empty for another Slurm."""


def write_first_files(directory: Path) -> FirstFiles:
    """Query Slurm, and write `site.yaml` and `recipe.yaml` to a directory, which is created if necessary.

    Raises UsageError if a file exists already, or the directory cannot be created or written. Nothing is written then.
    """
    recipe, site = directory / "recipe.yaml", directory / "site.yaml"
    existing = [path for path in (recipe, site) if files.exists(path)]
    if existing:
        fix = "init never overwrites: move it, or give another directory"
        raise UsageError([Violation(str(path), "", "already exists", fix) for path in existing])
    proposal, why = _ask_slurm()
    if not is_dir(directory):
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            why = f"cannot be created: {error.strerror}"
            raise UsageError([Violation("DIR", str(directory), why, "give another directory")]) from None
    if proposal is None or proposal.gpu is None:
        write_new({recipe: _recipe_text(proposal)})
        return FirstFiles(recipe, None, proposal, why)
    # The nodes of an embedded cluster have no GPUs and no names that resolve; only the cluster knows their addresses.
    cluster = Cluster.of_slurm_conf(os.environ.get("SLURM_CONF", ""))
    text = cluster.site_text() if cluster else _site_text(proposal, directory)
    write_new({site: text, recipe: _recipe_text(proposal, on_cpus=cluster is not None)})
    return FirstFiles(recipe, site, proposal, embedded=cluster.spec.name if cluster else "")


def _ask_slurm() -> tuple[Proposal | None, str]:
    """Return the partitions of Slurm, and the reason why there can be no site file."""
    try:
        proposal = propose(cluster_facts(SlurmClient()))
    except ClusterError as error:
        return None, f"Slurm does not answer here ({str(error).splitlines()[0]})"
    if proposal.gpu is None:
        return proposal, "Slurm has no partition with GPUs (GRES gpu) that you may use"
    return proposal, ""


def _recipe_text(proposal: Proposal | None, *, on_cpus: bool = False) -> str:
    gpu = proposal.gpu if proposal else None
    site = local_site(Path("runs"))
    here = site.nodes["default"].gpus if site.device == "cuda" else 0
    # An embedded cluster pretends to have GPUs, but its processes compute on CPUs.
    real_gpus = 0 if on_cpus else gpu.gpus if gpu else here
    base = FIRST_RECIPES[min(real_gpus, max(FIRST_RECIPES))]
    limit = FIRST_RUN_MINUTES if gpu is None or gpu.max_minutes is None else min(FIRST_RUN_MINUTES, gpu.max_minutes)
    hours, minutes = divmod(limit, 60)
    template = environment(autoescape=False).get_template("first_recipe.yaml.j2")
    return template.render(base=base, gpu=gpu, time=f"{hours:02}:{minutes:02}:00")


def _site_text(proposal: Proposal, directory: Path) -> str:
    runs, shared = guessed_runs_directory(directory, os.environ, Path("/proc/self/mounts").read_text())
    template = environment(autoescape=False).get_template("first_site.yaml.j2")
    return template.render(
        found=proposal,
        gpu=proposal.gpu,
        cpu=proposal.cpu,
        runs=runs,
        shared=shared,
        slurm_conf=os.environ.get("SLURM_CONF", ""),
        has_torch=importlib.util.find_spec("torch") is not None,
        repository=REPOSITORY,
    )


def guessed_runs_directory(directory: Path, variables: Mapping[str, str], mounts: str) -> tuple[Path, bool]:
    """Guess a directory for runs that all nodes share.

    The site file is in `directory`, `variables` is the environment, and `mounts` is the content of /proc/self/mounts.
    The second result is False if no network file system was found; the first is then next to the site file.
    """
    user = pwd.getpwuid(os.geteuid()).pw_name
    candidates = [(directory, directory / "runs")]
    candidates += [
        (Path(variables[name]), Path(variables[name]) / "primeslurm" / "runs") for name in _WORK if variables.get(name)
    ]
    candidates += [
        (path, path / "primeslurm" / "runs") for path in (Path("/scratch") / user, Path("/work") / user, Path.home())
    ]
    for base, runs in candidates:
        if is_dir(base) and os.access(base, os.W_OK) and _file_system(base.resolve(), mounts) in _SHARED:
            return runs.resolve(), True
    return (directory / "runs").resolve(), False


def _file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that contains a path."""
    mount_point, kind = Path("/"), ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) > 2:
            # A later mount hides an earlier one at the same place.
            point = Path(fields[1].encode().decode("unicode_escape"))
            if path.is_relative_to(point) and point.is_relative_to(mount_point):
                mount_point, kind = point, fields[2]
    return kind
