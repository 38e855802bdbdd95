"""Write the first files of a new user: a site file for the cluster, and a recipe that fits on it."""

from __future__ import annotations

import importlib.util
import os
import pwd
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from primeslurm.api.setup.ready_recipes import write_new
from primeslurm.api.sites import local_site
from primeslurm.api.testbed import Cluster
from primeslurm.base import files
from primeslurm.base.errors import ClusterError, UsageError, Violation
from primeslurm.base.paths import REPOSITORY, is_dir
from primeslurm.base.templating import environment
from primeslurm.slurm.accounting import Association
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.cluster_fit import ClusterFacts, cluster_facts
from primeslurm.slurm.partitions import Partition, PartitionNode, is_broken, parse_gres

GPU_GRES = "gpu"
# Nodes have a RealMemory of 1 MiB if slurm.conf does not set it.
_UNSET_MEMORY_MIB = 1024


@dataclass(frozen=True)
class PartitionOffer:
    """Equal nodes of a partition that this user may use."""

    partition: str
    nodes: int
    gpus: int  # per node; 0 for a CPU partition
    gres: str  # generic resource to request, with the type of GPU if Slurm knows it
    cpus: int
    memory_gib: int | None  # Per node. None: slurm.conf does not set it.
    max_minutes: int | None  # Longest job. None: no limit.
    account: str  # account for jobs; empty if Slurm does not require accounts
    qos: str  # QOS for jobs; empty if the default can be used

    @property
    def size(self) -> tuple[int, int, float]:
        """Sort key: more GPUs, more cores, longer jobs."""
        longest = float("inf") if self.max_minutes is None else self.max_minutes
        return self.nodes * self.gpus, self.nodes * self.cpus, longest

    def __str__(self) -> str:
        gpus = f", {self.gpus} x {self.gres}" if self.gpus else ""
        limit = "no time limit" if self.max_minutes is None else f"at most {self.max_minutes} minutes"
        count = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        return f"{self.partition}: {count} with {self.cpus} cores{gpus}, {limit}"


@dataclass(frozen=True)
class Proposal:
    """Partitions, accounts and QOS of this user."""

    gpu: PartitionOffer | None  # the largest partition with GPUs
    cpu: PartitionOffer | None  # the largest partition without GPUs whose nodes can be in the same job
    offers: tuple[PartitionOffer, ...]  # all partitions, the largest first
    refused: tuple[str, ...]  # partitions that this user may not use now
    accounts: tuple[str, ...]
    qos_names: tuple[str, ...]


def propose(facts: ClusterFacts) -> Proposal:
    """Choose the partitions of a first site file."""
    offers: list[PartitionOffer] = []
    for partition in facts.partitions.values():
        offers += _offers(partition, facts)
    offers.sort(key=lambda offer: offer.size, reverse=True)
    associations = facts.accounting.associations
    gpu = next((offer for offer in offers if offer.gpus), None)
    return Proposal(
        gpu=gpu,
        cpu=next((offer for offer in offers if gpu and _goes_with(offer, gpu)), None),
        offers=tuple(offers),
        refused=tuple(sorted(set(facts.partitions) - {offer.partition for offer in offers})),
        accounts=tuple(sorted({each.account for each in associations})),
        qos_names=tuple(sorted({name for each in associations for name in each.qos_names})),
    )


def _goes_with(cpu: PartitionOffer, gpu: PartitionOffer) -> bool:
    return not cpu.gpus and cpu.partition != gpu.partition and (cpu.account, cpu.qos) == (gpu.account, gpu.qos)


def _offers(partition: Partition, facts: ClusterFacts) -> Iterator[PartitionOffer]:
    """Return the most frequent kind of node with GPUs, and without, that this user may use in a partition."""
    right = _right_to_use(partition, facts)
    if right is None:
        return
    account, qos, limit = right
    usable = [node for node in partition.nodes if not is_broken(node.state)]
    for with_gpus in (True, False):
        alike = _most_frequent(node for node in usable if (gpus_of(node)[0] > 0) == with_gpus)
        if not alike or (partition.max_nodes is not None and partition.max_nodes < 1):
            continue
        gpus, gres = gpus_of(alike[0])
        memory = min([node.memory_mib for node in alike] + [partition.max_memory_mib or alike[0].memory_mib])
        yield PartitionOffer(
            partition=partition.name,
            nodes=len(alike),
            gpus=gpus,
            gres=gres,
            cpus=min([node.cpus for node in alike] + [partition.max_cpus_per_node or alike[0].cpus]),
            memory_gib=memory // 1024 if memory >= _UNSET_MEMORY_MIB else None,
            max_minutes=min((each for each in (partition.max_minutes, limit) if each is not None), default=None),
            account=account,
            qos=qos,
        )


def gpus_of(node: PartitionNode) -> tuple[int, str]:
    """Return the number of GPUs of a node's most frequent type, and the generic resource to request."""
    gpus = [each for each in parse_gres(node.gres) if each.name == GPU_GRES]
    if not gpus:
        return 0, GPU_GRES
    most = max(gpus, key=lambda each: each.count)
    return most.count, f"{GPU_GRES}:{most.type}" if most.type else GPU_GRES


def _most_frequent(nodes: Iterable[PartitionNode]) -> list[PartitionNode]:
    candidates = list(nodes)
    if not candidates:
        return []
    ((kind, _),) = Counter(map(gpus_of, candidates)).most_common(1)
    return [node for node in candidates if gpus_of(node) == kind]


def _right_to_use(partition: Partition, facts: ClusterFacts) -> tuple[str, str, int | None] | None:
    """Return account, QOS and time limit [min] of this user's jobs in a partition; None if it accepts none."""
    if partition.state != "UP" or partition.needs_reservation:
        return None
    closed = partition.root_only or (partition.groups is not None and not (facts.groups or set()) & partition.groups)
    if closed and facts.groups is not None:  # root may use every partition
        return None
    accounting = facts.accounting
    if "associations" not in accounting.enforced:
        return "", "", None
    mine = [each for each in accounting.associations if each.partition in ("", partition.name)]
    mine.sort(key=lambda each: (each.account != accounting.default_account, each.account))
    for association in mine:
        denied = association.account in partition.denied_accounts
        if denied or (partition.accounts is not None and association.account not in partition.accounts):
            continue
        for qos in _qos_to_try(association) if "qos" in accounting.enforced else [""]:
            if qos and (qos in partition.denied_qos or not (partition.qos_names is None or qos in partition.qos_names)):
                continue
            limits = [association.limits.minutes]
            limits += [accounting.qos[name].limits.minutes for name in (qos, partition.qos) if name in accounting.qos]
            named = "" if qos == association.default_qos else qos
            return association.account, named, min((each for each in limits if each is not None), default=None)
    return None


def _qos_to_try(association: Association) -> list[str]:
    default = association.default_qos
    return list(dict.fromkeys([*([default] if default else []), *sorted(association.qos_names)])) or [""]


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
    site: Path | None  # None: there is no Slurm with GPUs here, and the recipe runs with `--local`
    proposal: Proposal | None
    why_local: str = ""  # reason why there is no site file
    embedded: str = ""  # name of the embedded cluster that `SLURM_CONF` belongs to; empty for another Slurm


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
    mount_point, kind = Path("/"), ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) > 2:
            # A later mount hides an earlier one at the same place.
            point = Path(fields[1].encode().decode("unicode_escape"))
            if path.is_relative_to(point) and point.is_relative_to(mount_point):
                mount_point, kind = point, fields[2]
    return kind
