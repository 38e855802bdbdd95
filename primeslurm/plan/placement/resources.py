"""Nodes and GPUs that each role of a recipe requests from a site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from primeslurm.base.errors import UsageError, Violation
from primeslurm.plan.model import NodeRole
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.sections.deployment import Disaggregated
from primeslurm.recipe.sections.slurm import Component
from primeslurm.recipe.sections.teacher import TeacherEngines
from primeslurm.recipe.site import NodeKind

# Roles that use no GPU
WITHOUT_GPUS: tuple[NodeRole, ...] = ("control", "environments")
# Larger requests are typing errors. Planning them would take hours.
MAX_NODES = 10_000


@dataclass(frozen=True)
class ResourceRequest:
    """Resources of one role."""

    role: NodeRole
    nodes: int
    gpus: int  # GPUs used on each node
    kind: NodeKind  # node kind, with the cores and memory that belong to these GPUs
    nodes_per_replica: int  # Nodes of this role per inference replica. 0 for other roles.
    spares: int  # additional nodes that replace failed ones
    colocated: bool = False  # whether the role shares the trainer's GPUs, which the trainer's request counts


@dataclass(frozen=True)
class _RoleRequest:
    """Resources that the recipe requests for one role, and the field of the request."""

    role: NodeRole
    field: str
    nodes: int
    gpus: int | None
    nodes_per_replica: int = 0

    @property
    def nodes_field(self) -> tuple[str, str]:
        """Return the field that sets the number of nodes, and its value. For engines, several fields set it."""
        if self.nodes_per_replica:
            return self.field, f"{self.nodes} nodes"
        return f"{self.field}.nodes", f"{self.nodes}"


def resource_requests(recipe: Recipe, site: Site) -> list[ResourceRequest]:
    """Return nodes and GPUs of each role, in order of the job's components. The head runs on the first node.

    Raises:
        UsageError: the site cannot provide them. Lists every reason.
    """
    problems: list[Violation] = []
    role_requests = _role_requests(recipe)
    if recipe.deployment.layout == "one_node":
        requests = _on_one_node(recipe, role_requests, site, problems)
    else:
        requests = [request for each in role_requests if (request := _place(recipe, each, site, problems))]
        problems += _spare_problems(recipe, role_requests)
    problems += (
        _engine_problems(recipe, requests) + _expert_problems(recipe, requests) + _router_problems(recipe, requests)
    )
    problems += _trainer_problems(recipe, requests) + _teacher_problems(recipe, requests)
    partitions = sorted({request.kind.partition for request in requests})
    if recipe.deployment.layout == "single" and len(partitions) > 1:
        why = f"one allocation cannot span partitions {', '.join(partitions)}"
        problems.append(Violation("deployment.layout", "single", why, "use layout: het"))
    if (nodes := sum(request.nodes + request.spares for request in requests)) > MAX_NODES:
        problems.append(Violation("deployment", f"{nodes} nodes", f"more than {MAX_NODES} nodes cannot be planned"))
    if problems:
        raise UsageError(problems)
    return requests


def component_of(recipe: Recipe, role: NodeRole) -> Component:
    """Return the Slurm options of a role's nodes. `deployment.environments` may set the size of its own nodes."""
    if recipe.deployment.layout != "het":
        return recipe.slurm.train  # the roles share one component of the job
    component: Component = getattr(recipe.slurm, role)
    nodes = recipe.deployment.environments
    if role != "environments" or nodes is None:
        return component
    return component.model_copy(
        update={"cpus_per_task": nodes.cpus or component.cpus_per_task, "mem": nodes.memory or component.mem}
    )


def combined_request(requests: Sequence[ResourceRequest]) -> ResourceRequest:
    return replace(requests[0], gpus=count_gpus(requests))


def count_gpus(requests: Sequence[ResourceRequest]) -> int:
    """Count the GPUs that Slurm bills: those of spare nodes, too, and a GPU that two roles share once."""
    return sum((request.nodes + request.spares) * request.gpus for request in requests if not request.colocated)


def _on_one_node(
    recipe: Recipe, role_requests: Sequence[_RoleRequest], site: Site, problems: list[Violation]
) -> list[ResourceRequest]:
    """Divide the GPUs of one node among the roles. At most one role may leave its number open. It gets the rest."""
    field, why = "deployment.layout", "all roles share one node"
    problems += [
        Violation(*each.nodes_field, why, "use 1 node and 1 replica, or layout: single or het")
        for each in role_requests
        if each.nodes != 1
    ]
    if any(count for _, count in recipe.deployment.spares):
        problems.append(Violation("deployment.spares", "", f"{why}, so no node can replace it", "leave it out"))
    kind = site.kind(role_requests[0].role)
    if kind is None:
        return [request for each in role_requests[:1] if (request := _place(recipe, each, site, problems))]
    colocated = [each for each in role_requests if recipe.colocated and each.role == "inference"]
    counted = [each for each in role_requests if each not in colocated]
    requested = sum(each.gpus or 0 for each in counted)
    open_requests = [each for each in counted if each.gpus is None]
    if len(open_requests) > 1:
        names = ", ".join(f"{each.field}.gpus_per_node" for each in open_requests)
        fix = f"set all but one of {names}; together they get {kind.gpus - requested} GPUs"
        problems.append(
            Violation(field, "one_node", "the recipe does not say how the roles share the GPUs of the node", fix)
        )
        return []
    rest = kind.gpus - requested
    if rest < 0 or (open_requests and rest == 0):
        what = f"the roles need at least {requested + len(open_requests)} GPUs"
        why = f"{what}, but nodes of partition {kind.partition} have {kind.gpus}"
        problems.append(Violation(field, "one_node", why, "lower gpus_per_node of a role"))
        return []
    sizes = {each.role: rest if each.gpus is None else each.gpus for each in counted}
    sizes |= {each.role: sizes["train"] for each in colocated}
    component = component_of(recipe, "train")
    whole = kind.exclusive if component.exclusive is None else component.exclusive
    part = kind if whole else kind.share(sum(sizes[each.role] for each in counted))
    problems += [
        Violation(f"{each.field}.gpus_per_node", "0", f"role {each.role} needs a GPU", "use 1 or more")
        for each in counted
        if sizes[each.role] == 0 and each.role not in WITHOUT_GPUS
    ]
    return [
        ResourceRequest(each.role, 1, sizes[each.role], part, each.nodes_per_replica, 0, each in colocated)
        for each in role_requests
    ]


def local_problems(site: Site, requests: list[ResourceRequest]) -> list[Violation]:
    if site.device != "cuda":
        return []
    requested, available = count_gpus(requests), max(kind.gpus for kind in site.nodes.values())
    if requested <= available:
        return []
    why = f"the roles together need {requested} GPUs, but this machine has {available}"
    return [Violation("deployment", "", why, "lower gpus_per_node of a role")]


def _role_requests(recipe: Recipe) -> list[_RoleRequest]:
    deployment, inference = recipe.deployment, recipe.deployment.inference
    gpus = deployment.train.gpus_per_node
    if recipe.colocated and gpus is None and not isinstance(inference, Disaggregated):
        gpus = inference.gpus_per_node
    train = _RoleRequest("train", "deployment.train", deployment.train.nodes, gpus)
    if recipe.task == "sft":
        return [train]
    # In a single allocation the control processes share the first trainer node.
    control = [_RoleRequest("control", "deployment", 1, 0)] if deployment.layout == "het" else []
    if recipe.tenant is not None:
        return control  # the deployment has the others
    first = {"rl": [*control, train], "tenants": [*control, train], "eval": control}.get(recipe.task, [])
    teacher, environments = _teacher_request(recipe), _environments_request(recipe)
    where, replicas = "deployment.inference", inference.num_replicas
    if isinstance(inference, Disaggregated):
        p, d = inference.prefill, inference.decode
        prefill = _RoleRequest("prefill", f"{where}.prefill", p.nodes * replicas, p.gpus_per_node, p.nodes)
        decode = _RoleRequest("decode", f"{where}.decode", d.nodes * replicas, d.gpus_per_node, d.nodes)
        return [*first, prefill, decode, *teacher, *environments]
    per_replica = inference.nodes_per_replica
    engines = _RoleRequest("inference", where, per_replica * replicas, inference.gpus_per_node, per_replica)
    return [*first, engines, *teacher, *environments]


def _teacher_request(recipe: Recipe) -> list[_RoleRequest]:
    teacher = recipe.teacher
    if not isinstance(teacher, TeacherEngines):
        return []
    return [_RoleRequest("teacher", "teacher", teacher.nodes, teacher.gpus_per_node)]


def _environments_request(recipe: Recipe) -> list[_RoleRequest]:
    nodes = recipe.deployment.environments
    return [_RoleRequest("environments", "deployment.environments", nodes.nodes, 0)] if nodes else []


def _place(recipe: Recipe, request: _RoleRequest, site: Site, problems: list[Violation]) -> ResourceRequest | None:
    role, field = request.role, request.field
    kind = site.kind(role)
    if kind is None:
        why = f"site {site.name} has no nodes for role {role}"
        *names, last = site.kind_names(role)
        fix = f"add `{'`, `'.join(names)}` or `{last}` under `nodes` of the site file"
        problems.append(Violation(field, "", why, fix))
        return None
    gpus = kind.gpus if request.gpus is None else request.gpus
    if gpus > kind.gpus:
        why = f"nodes of partition {kind.partition} have {kind.gpus} GPUs"
        fix = f"nearest: {kind.gpus}" if kind.gpus else "use nodes that have GPUs"
        problems.append(Violation(f"{field}.gpus_per_node", str(gpus), why, fix))
    if role not in WITHOUT_GPUS and gpus == 0:
        why = f"role {role} needs GPUs, but partition {kind.partition} has none"
        problems.append(Violation(field, "", why))
    cpus = recipe.deployment.environments.cpus if recipe.deployment.environments else None
    if role == "environments" and cpus is not None and cpus > kind.cpus:
        why = f"a job may use {kind.cpus} CPU cores of a node of partition {kind.partition}"
        problems.append(Violation(f"{field}.cpus", str(cpus), why, f"nearest: {kind.cpus}"))
    component = component_of(recipe, role)
    whole = kind.exclusive if component.exclusive is None else component.exclusive
    part = kind if whole else kind.share(gpus)
    return ResourceRequest(role, request.nodes, gpus, part, request.nodes_per_replica, _spares(recipe, role))


def _spares(recipe: Recipe, role: NodeRole) -> int:
    spares = recipe.deployment.spares
    if role == "control":
        # Without a spare, the head is a component of one node, and then no job survives the loss of a node
        # (`Plan.survives_nodes`).
        environments = recipe.deployment.environments
        return int(any(value for _, value in spares) or (environments is not None and environments.nodes > 1))
    return int(getattr(spares, role))


def _spare_problems(recipe: Recipe, role_requests: Sequence[_RoleRequest]) -> list[Violation]:
    """Refuse spares of roles that have no nodes. A rule of the recipe does so for environments."""
    roles = [each.role for each in role_requests if each.role != "control"]
    return [
        Violation(
            f"deployment.spares.{role}",
            str(count),
            f"this recipe has no {role} nodes",
            f"leave it out, or use {', '.join(roles)}",
        )
        for role, count in recipe.deployment.spares
        if count and role not in (*roles, "environments")
    ]


def _engine_problems(recipe: Recipe, requests: list[ResourceRequest]) -> list[Violation]:
    tp = recipe.inference.parallel.tp
    return [
        Violation(
            "inference.parallel.tp",
            str(tp),
            f"must divide the {request.gpus} GPUs of each {request.role} node",
            f"nearest: {_nearest_divisor(request.gpus, tp)}",
        )
        for request in requests
        if request.nodes_per_replica and request.gpus and request.gpus % tp
    ]


def _router_problems(recipe: Recipe, requests: list[ResourceRequest]) -> list[Violation]:
    # vllm-router exits if its policy has a single engine to choose from.
    router, tp = recipe.inference.router, recipe.inference.parallel.tp
    if router.type != "vllm-router":
        return []
    why = "chooses between two engines, but a replica has only one of role {}"
    problems = []
    for request in requests:
        few = request.nodes_per_replica and request.nodes_per_replica * request.gpus // tp < 2
        field = "decode_policy" if request.role == "decode" and router.decode_policy else "policy"
        if few and getattr(router, field) == "power_of_two":
            text = why.format(request.role)
            problems.append(Violation(f"inference.router.{field}", "power_of_two", text, "nearest: consistent_hash"))
    return problems


def _expert_problems(recipe: Recipe, requests: list[ResourceRequest]) -> list[Violation]:
    """Return problems of data-parallel groups that do not fill their nodes evenly."""
    tp, dp = recipe.inference.parallel.tp, recipe.inference.parallel.dp
    if dp is None:
        return []
    field = "inference.parallel.dp"
    if not recipe.inference.expert_parallel:
        why = "engines are independent without inference.expert_parallel"
        return [Violation(field, str(dp), why, "leave it out, or set inference.expert_parallel: true")]
    sizes = {
        request.role: group_nodes(recipe, request) * request.gpus // tp
        for request in requests
        if request.nodes_per_replica
    }
    return [
        Violation(
            field,
            str(dp),
            f"must divide the {engines} engines of a group of {role} nodes",
            f"nearest: {_nearest_divisor(engines, dp)}",
        )
        for role, engines in sizes.items()
        if engines % dp
    ]


def group_nodes(recipe: Recipe, request: ResourceRequest) -> int:
    """Return the nodes of one group of engines. With expert parallelism, they share the experts."""
    inference = recipe.deployment.inference
    if isinstance(inference, Disaggregated):
        return (inference.prefill if request.role == "prefill" else inference.decode).nodes_per_replica
    return request.nodes_per_replica


def expert_ranks(recipe: Recipe, request: ResourceRequest) -> int:
    """Return the GPUs over which the experts of an engine are spread; 1 without expert parallelism."""
    if not recipe.inference.expert_parallel:
        return 1
    tp, dp = recipe.inference.parallel.tp, recipe.inference.parallel.dp
    return tp * dp if dp else group_nodes(recipe, request) * request.gpus


def _trainer_problems(recipe: Recipe, requests: list[ResourceRequest]) -> list[Violation]:
    p = recipe.trainer.parallelism
    world = next((request.nodes * request.gpus for request in requests if request.role == "train"), 0)
    if not world:
        return []
    if world % (p.dp_replicate * p.cp):
        why = f"dp_replicate x cp = {p.dp_replicate * p.cp} must divide the {world} trainer GPUs"
        return [Violation("trainer.parallelism", f"dp_replicate={p.dp_replicate}, cp={p.cp}", why)]
    shard = world // p.dp_replicate
    if shard % p.ep:
        why = f"must divide the {shard} GPUs of one FSDP group"
        return [Violation("trainer.parallelism.ep", str(p.ep), why, f"nearest: {_nearest_divisor(shard, p.ep)}")]
    return []


def _teacher_problems(recipe: Recipe, requests: list[ResourceRequest]) -> list[Violation]:
    teacher, gpus = recipe.teacher, next((request.gpus for request in requests if request.role == "teacher"), 0)
    if not isinstance(teacher, TeacherEngines) or not gpus or gpus % teacher.tp == 0:
        return []
    why = f"must divide the {gpus} GPUs of each teacher node"
    return [Violation("teacher.tp", str(teacher.tp), why, f"nearest: {_nearest_divisor(gpus, teacher.tp)}")]


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
