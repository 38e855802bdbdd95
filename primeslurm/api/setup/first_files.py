"""The first files of a new user: a site file that describes the cluster, and a recipe that fits on it."""

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

FIRST_RECIPES = {0: "smollm2_arithmetic_cpu", 1: "smollm2_arithmetic_one_gpu", 2: "smollm2_arithmetic"}
"""Ready recipe for a node with this many GPUs; the last one for more, too."""
FIRST_RUN_MINUTES = 60
"""Time limit of the first run, where the partition allows it."""
_SHARED = frozenset(
    [
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "wekafs", "panfs", "pvfs2", "orangefs"),
        *("fuse.juicefs", "fuse.glusterfs", "glusterfs", "cifs", "smb3", "afs", "quobyte", "fuse.quobyte"),
    ]
)
"""Types of network file systems, as /proc/mounts names them."""
_WORK = ("SCRATCH", "WORK", "PROJECT", "PROJECTS", "WORKDIR")
"""Variables that clusters set to a user's directory on a shared file system."""


@dataclass(frozen=True)
class FirstFiles:
    """What `init` wrote, and what it found."""

    recipe: Path
    site: Path | None
    """None: there is no Slurm with GPUs here, and the recipe runs with `--local`."""
    proposal: Proposal | None
    why_local: str = ""
    """Why there is no site file."""
    embedded: str = ""
    """Name of the embedded cluster that `SLURM_CONF` belongs to; empty if it is another Slurm's."""


def write_first_files(directory: Path) -> FirstFiles:
    """Ask Slurm what there is, and write `site.yaml` and `recipe.yaml`. Files that exist are never overwritten.

    Args:
        directory: where both are written. It is created if it does not exist.

    Raises:
        UsageError: a file exists; every one of them. Or the directory cannot be created or written. Nothing is written
            then.
    """
    recipe, site = directory / "recipe.yaml", directory / "site.yaml"
    existing = [path for path in (recipe, site) if files.exists(path)]
    if existing:
        fix = "init never overwrites: move it, or give another directory"
        raise UsageError([Violation(str(path), "", "exists already", fix) for path in existing])
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
    """What Slurm offers, and why that is not enough for a site file."""
    try:
        proposal = propose(cluster_facts(SlurmClient()))
    except ClusterError as error:
        return None, f"Slurm gives no answer here ({str(error).splitlines()[0]})"
    if proposal.gpu is None:
        return proposal, "Slurm has no partition with GPUs (GRES gpu) that you may use"
    return proposal, ""


def _recipe_text(proposal: Proposal | None, *, on_cpus: bool = False) -> str:
    gpu = proposal.gpu if proposal else None
    site = local_site(Path("runs"))
    here = site.nodes["default"].gpus if site.device == "cuda" else 0
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
    """Guess where runs may live: on a file system that nodes share.

    Args:
        directory: where the site file is.
        variables: of the environment.
        mounts: content of /proc/self/mounts.

    Returns:
        The directory, and whether it is on a network file system. If no candidate is, it is beside the site file.
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
    """The type of the file system that a path is on."""
    found, kind = Path("/"), ""
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) > 2:
            # A later mount hides an earlier one at the same place.
            point = Path(words[1].encode().decode("unicode_escape"))
            if path.is_relative_to(point) and point.is_relative_to(found):
                found, kind = point, words[2]
    return kind
