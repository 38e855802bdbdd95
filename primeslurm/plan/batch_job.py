"""The components, options and environment of the batch job. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from primeslurm.base import logs
from primeslurm.base.errors import Violation
from primeslurm.base.hostlists import expand
from primeslurm.base.units import duration
from primeslurm.plan.model import HetGroup, JobOptions, NodeRole
from primeslurm.plan.placement.resources import ResourceRequest, combined_request, component_of
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.fields.types import bytes_of, minutes, times
from primeslurm.recipe.sections.slurm import (
    DEFAULT_TIME,
    Apptainer,
    Component,
    ComponentOptions,
    Container,
    Pyxis,
    Submission,
)
from primeslurm.wire.transport import secret

# Options that set the memory of a component
_MEMORY = ("mem", "mem_per_gpu", "mem_per_cpu")
# Patterns that submitit replaces in the path of its folder. Slurm's own patterns are escaped (`slurm.render`).
_REPLACED = ("%j", "%t", "%A", "%a")


def problems(recipe: Recipe, site: Site) -> list[Violation]:
    """Return problems of host lists, time limits, directories, and options that contradict each other."""
    problems = [*_host_problems(recipe, site), *_time_problems(recipe, site), *_run_dir_problems(recipe, site)]
    for field, options in _component_options(recipe, site):
        memory_options = [(name, value) for name in _MEMORY if (value := getattr(options, name))]
        why = f"contradicts {memory_options[0][0]}" if memory_options else ""
        problems += [Violation(f"{field}.{name}", value, why, "keep one of them") for name, value in memory_options[1:]]
    return problems + _environment_contradictions(recipe)


def _environment_contradictions(recipe: Recipe) -> list[Violation]:
    nodes, slurm = recipe.deployment.environments, recipe.slurm.environments
    if nodes is None:
        return []
    pairs: list[tuple[str, object, str, object]] = [("cpus", nodes.cpus, "cpus_per_task", slurm.cpus_per_task)]
    pairs += [("memory", nodes.memory, name, getattr(slurm, name)) for name in _MEMORY]
    return [
        Violation(
            f"deployment.environments.{name}", str(value), f"contradicts slurm.environments.{other}", "keep one of them"
        )
        for name, value, other, slurm_value in pairs
        if value is not None and slurm_value is not None
    ]


def groups(recipe: Recipe, requests: list[ResourceRequest]) -> tuple[HetGroup, ...]:
    """Return the job's components in order: one per role, or a single one."""
    if recipe.deployment.layout == "one_node":
        request = combined_request(requests)
        return (_group(0, "all", 1, 0, request, component_of(recipe, "train")),)
    if recipe.deployment.layout == "single":
        widest = max(requests, key=lambda request: request.gpus)
        nodes, spares = sum(request.nodes for request in requests), sum(request.spares for request in requests)
        return (_group(0, "all", nodes, spares, widest, component_of(recipe, widest.role)),)
    return _with_uniform_memory(
        tuple(
            _group(index, request.role, request.nodes, request.spares, request, component_of(recipe, request.role))
            for index, request in enumerate(requests)
        )
    )


def _with_uniform_memory(groups: tuple[HetGroup, ...]) -> tuple[HetGroup, ...]:
    # srun refuses --mem beside --mem-per-cpu of another component, so all components use memory per node if one does.
    if not any(group.mem for group in groups):
        return groups
    return tuple(
        group.model_copy(update={"mem": times(group.mem_per_cpu, group.cpus_per_task), "mem_per_cpu": None})
        if group.mem_per_cpu
        else group
        for group in groups
    )


def cpus_per_gpu(recipe: Recipe, requests: list[ResourceRequest]) -> int:
    """Return the CPU cores per trainer rank, at least one."""
    train = next((request for request in requests if request.role == "train"), None)
    if train is None or not train.gpus:
        return 1
    on_node = combined_request(requests).gpus if recipe.deployment.layout == "one_node" else train.gpus
    return max(1, (component_of(recipe, "train").cpus_per_task or train.kind.cpus) // on_node)


def job_options(recipe: Recipe, site: Site, run_dir: Path) -> JobOptions:
    """Return the options of the whole job. The recipe's options take precedence over the site's."""
    slurm, submission = recipe.slurm, recipe.slurm.over(site.slurm)
    same = {name: getattr(submission, name) for name in JobOptions.model_fields.keys() & Submission.model_fields.keys()}
    return JobOptions(
        **same | {"time": submission.time or DEFAULT_TIME},
        name=recipe.name,
        mail_user=submission.mail.user if submission.mail else None,
        mail_types=submission.mail.types if submission.mail else (),
        requeue=slurm.requeue,
        signal_s=slurm.signal_s,
        modules=site.modules,
        prologue=site.prologue,
        srun=_pyxis(submission.container, run_dir) if isinstance(submission.container, Pyxis) else (),
        launcher=_apptainer(submission.container, site, run_dir) if isinstance(submission.container, Apptainer) else (),
    )


def environment(recipe: Recipe, site: Site) -> dict[str, str]:
    """Return the environment of every process on every node, with placeholders."""
    env = {
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": "${tmp}",
        "GLOO_SOCKET_IFNAME": "${interface}",
        "NCCL_SOCKET_IFNAME": "${nccl_interface}",
        "NCCL_IB_HCA": "${nccl_hcas}",
        # NVSHMEM (DeepEP) ignores NCCL's variables. It would use IPoIB or the first Ethernet, and other networks' HCAs.
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "${interface}",
        "NVSHMEM_HCA_LIST": "${hca_ports}",
    }
    if site.device == "cpu":
        # One thread per process, because an emulated cluster runs many nodes on few cores.
        env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_CONFIG_ROOT": "${tmp}/vllm"}
    if recipe.logging.level != "info":
        env[logs.LEVEL] = recipe.logging.level
    if recipe.logging.format != "text":
        env[logs.FORMAT] = recipe.logging.format
    return env | site.env | {secret.VARIABLE: "${secret}"}


def _group(index: int, name: str, nodes: int, spares: int, request: ResourceRequest, component: Component) -> HetGroup:
    kind = request.kind
    gpus = f"{kind.gres}:{request.gpus}" if request.gpus else None
    per_node = gpus.partition(":")[2] if gpus else None
    memory = component if any(getattr(component, name) for name in _MEMORY) else kind
    return HetGroup(
        index=index,
        name=name,
        nodes=nodes + spares,
        spares=spares,
        partition=component.partition or kind.partition,
        gres=gpus if kind.request_gpus == "gres" else None,
        gpus_per_node=per_node if kind.request_gpus == "gpus-per-node" else None,
        cpus_per_task=component.cpus_per_task or kind.cpus,
        mem=None if memory.mem_per_cpu else _memory(component, request),
        mem_per_cpu=memory.mem_per_cpu,
        constraint=component.constraint or kind.constraint,
        nodelist=component.nodelist or kind.nodelist,
        switches=component.switches or kind.switches,
        exclusive=is_exclusive(component, request),
    )


def is_exclusive(component: Component, request: ResourceRequest) -> bool:
    """Return whether a job takes whole nodes for a role."""
    # If Slurm does not count GPUs, only exclusive nodes keep jobs apart.
    exclusive = request.kind.exclusive if component.exclusive is None else component.exclusive
    return request.kind.request_gpus == "none" and request.gpus > 0 if exclusive is None else exclusive


def node_memory(recipe: Recipe, request: ResourceRequest) -> int | None:
    """Return the memory of a role's node that the job may use [bytes]; None if neither recipe nor site says."""
    memory = _memory(component_of(recipe, request.role), request)
    if memory is not None and (size := bytes_of(memory)):  # 0 requests all memory
        return size
    return None if request.kind.memory_gib is None else int(request.kind.memory_gib * 2**30)


def _memory(component: Component, request: ResourceRequest) -> str | None:
    """Return the memory per node to request. The recipe's option takes precedence over the site's."""
    # Slurm refuses --mem-per-gpu beside --mem of another component, so it is converted here.
    options = component if any(getattr(component, name) for name in _MEMORY) else request.kind
    if options.mem_per_cpu is not None:
        return times(options.mem_per_cpu, component.cpus_per_task or request.kind.cpus)
    return options.mem if options.mem_per_gpu is None else times(options.mem_per_gpu, max(request.gpus, 1))


def _pyxis(container: Pyxis, run_dir: Path) -> tuple[str, ...]:
    options = [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(_mounts(container, run_dir))}",
        "--container-writable" if container.writable else "--container-readonly",
        "--container-mount-home" if container.mount_home else "--no-container-mount-home",
    ]
    return (*options, *([f"--container-workdir={container.workdir}"] if container.workdir else []))


def _apptainer(container: Apptainer, site: Site, run_dir: Path) -> tuple[str, ...]:
    gpus = ["--nv"] if site.device == "cuda" else []
    binds = [word for mount in _mounts(container, run_dir) for word in ("--bind", mount)]
    return ("apptainer", "exec", *gpus, *binds, *container.options, container.image)


def _mounts(container: Container, run_dir: Path) -> tuple[str, ...]:
    return (f"{run_dir}:{run_dir}", *container.mounts)


def _component_options(recipe: Recipe, site: Site) -> Iterator[tuple[str, ComponentOptions]]:
    for role in get_args(NodeRole):
        yield f"slurm.{role}", getattr(recipe.slurm, role)
    for role, kind in site.nodes.items():
        yield f"site {site.name}: nodes.{role}", kind


def _host_problems(recipe: Recipe, site: Site) -> Iterator[Violation]:
    lists = [("slurm.exclude", recipe.slurm.exclude), (f"site {site.name}: slurm.exclude", site.slurm.exclude)]
    lists += [(f"{field}.nodelist", options.nodelist) for field, options in _component_options(recipe, site)]
    for field, value in lists:
        try:
            expand(value or "")
        except ValueError as error:
            yield Violation(field, repr(value), str(error), "for example node[001-003],login1")


def _run_dir_problems(recipe: Recipe, site: Site) -> Iterator[Violation]:
    run_dir = str(Path(site.runs).absolute() / recipe.name)
    if patterns := [pattern for pattern in _REPLACED if pattern in run_dir]:
        why = f"submitit would replace {' and '.join(patterns)} in {run_dir} by numbers of the job"
        yield Violation(
            f"site {site.name}: runs", site.runs, why, "use a directory without it, or a symbolic link to it"
        )


def _time_problems(recipe: Recipe, site: Site) -> Iterator[Violation]:
    submission = recipe.slurm.over(site.slurm)
    limit = submission.time or DEFAULT_TIME
    if submission.time_min and minutes(submission.time_min) > minutes(limit):
        yield Violation("slurm.time_min", submission.time_min, f"is longer than time = {limit}", f'nearest: "{limit}"')
    lead = recipe.slurm.signal_s
    shortest = 60 * minutes(submission.time_min or limit)
    if lead >= shortest:
        fix = f"nearest: {max(shortest // 2, 0)}"
        yield Violation("slurm.checkpoint_signal_s", str(lead), f"the job only runs for {duration(shortest)}", fix)
