"""Turn a recipe, a site and the recipe's files into a Plan with findings and an estimate. Pure and deterministic.

`derive` does the placement alone: nodes, ports, GPUs and commands, without checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from primeslurm.base.errors import UsageError, Violation
from primeslurm.models.shape import ModelShape
from primeslurm.plan import batch_job
from primeslurm.plan.auto_fields import choose_transport, resolve_auto_fields, with_kv_cache_size
from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.files import ModelFiles
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.checks.run_checks import check_plan, check_run
from primeslurm.plan.commands.processes import (
    GATEWAY,
    TENANT_HOST,
    TINKER,
    environment_command,
    gateway_command,
    orchestrator_command,
    tenant_host_command,
    tenant_trainer_command,
    tinker_command,
    trainer_command,
)
from primeslurm.plan.estimates.rates import measured_problems
from primeslurm.plan.estimates.time_limits import with_limits
from primeslurm.plan.forecast import Estimate, Quantity
from primeslurm.plan.model import Finding, Plan, Replica, Totals, as_findings
from primeslurm.plan.placement.fixed_port_checks import port_problems
from primeslurm.plan.placement.inference import place_inference, place_teacher
from primeslurm.plan.placement.node_builder import NodeBuilder, finish
from primeslurm.plan.placement.resources import ResourceRequest, count_gpus, local_problems, resource_requests
from primeslurm.plan.stand_ins import emulate
from primeslurm.plan.supervision import Health, HeartbeatLimits
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.phase_limits import LONG_PHASE_S
from primeslurm.recipe.sections.teacher import ServedTeacher
from primeslurm.wire.names import STATUS_PATH


@dataclass(frozen=True)
class RecipeFiles:
    """The files that a recipe names: their paths, shapes and problems."""

    located: Recipe  # the recipe with absolute paths of the models and data that exist here
    model: ModelFiles
    teacher: ModelFiles | None  # None if the run serves no teacher
    problems: tuple[Violation, ...] = ()  # why the files cannot be used
    absent: tuple[Finding, ...] = ()  # files that must exist when the job runs

    @property
    def blocked(self) -> bool:
        """Return whether a submission is refused here because a file is missing."""
        models = [files.absent for files in (self.model, self.teacher) if files is not None]
        return bool(self.absent or any(models))


@dataclass(frozen=True)
class Planned:
    """A Plan and the recipe that its processes read."""

    plan: Plan
    recipe: Recipe  # the recipe with absolute paths and without open fields

    def listening_at(self, addresses: dict[str, str]) -> Planned:
        """Return this plan with node addresses that were unknown when it was made, as in `Site.network.addresses`."""
        return replace(self, plan=self.plan.model_copy(update={"addresses": addresses}))


def make_plan(recipe: Recipe, site: Site, run_dir: Path, files: RecipeFiles, *, local: bool = False) -> Planned:
    """Plan a run as `try_plan` does.

    Raises:
        UsageError: the recipe cannot be placed on this site, or a check found errors. Lists every reason.
    """
    problems, findings, planned = try_plan(recipe, site, run_dir, files, local=local)
    if planned is None:
        raise UsageError([*problems, *refusals(findings, "error")])
    return planned


def try_plan(
    recipe: Recipe, site: Site, run_dir: Path, files: RecipeFiles, *, local: bool = False
) -> tuple[list[Violation], list[Finding], Planned | None]:
    """Plan a whole run, with all findings and the estimate. Unusable files block it (`blocked`).

    Returns:
        The reasons why the recipe cannot be placed on this site, all findings, and the plan if there are no such
        reasons.
    """
    transport = choose_transport(recipe, site.device, files.model.shape)
    recipe = resolve_auto_fields(recipe, files.model.model_type, site.device, files.model.shape)
    requests, problems = requests_of(recipe, site, local=local)
    findings, estimate = check_run(recipe, site, requests, files.model, files.teacher)
    about_files = [*files.absent, *as_findings(files.problems, "blocked")]
    if problems:
        return problems, [*findings, *about_files], None
    located, limits, about_limits = _with_limits(site, requests, files, estimate)
    findings += about_limits
    located = with_kv_cache_size(located, estimate)
    estimate = estimate and estimate.model_copy(update={"amounts": (*estimate.amounts, *limits)})
    try:
        plan = place(located, site, run_dir, requests, local=local)
    except UsageError as error:
        return list(error.violations), [*findings, *about_files], None
    findings += [*check_plan(located, plan), *about_files]
    plan = plan.model_copy(update={"weight_transport": transport, "findings": tuple(findings), "estimate": estimate})
    return [], findings, Planned(plan, located)


def _with_limits(
    site: Site, requests: list[ResourceRequest], files: RecipeFiles, estimate: Estimate | None
) -> tuple[Recipe, list[Quantity], list[Finding]]:
    """Return the recipe with time limits and `resolve_auto_fields` filled in, the limits, and findings about them."""
    teacher = files.teacher.shape if files.teacher else None
    recipe, limits, findings = with_limits(files.located, site, requests, files.model.shape, teacher, estimate)
    recipe = resolve_auto_fields(recipe, files.model.model_type, site.device, files.model.shape)
    return recipe, limits, findings


def make_emulated_plan(recipe: Recipe, site: Site, run_dir: Path, shape: ModelShape | None) -> Planned:
    """Return the plan of an emulated run, with the findings for the real run. Needs no model files.

    Raises:
        UsageError: the recipe cannot be placed on this site. Lists every reason.
    """
    # Emulated trainers and engines use no GPUs and compile nothing.
    transport = choose_transport(recipe, "cpu")
    recipe = resolve_auto_fields(recipe, None, "cpu")
    requests, problems = requests_of(recipe, site, local=False)
    if problems:
        raise UsageError(problems)
    plan = emulate(place(recipe, site, run_dir, requests, local=False))
    real = site.model_copy(update={"device": "cuda"})  # the real run may have conflicts that the emulated one has not
    findings = (*conflicts(RuleContext(recipe, real, requests, shape)), *check_plan(recipe, plan))
    return Planned(plan.model_copy(update={"weight_transport": transport, "findings": findings}), recipe)


def refuse(plan: Plan, *levels: str) -> None:
    if violations := refusals(plan.findings, *levels):
        raise UsageError(violations)


def refusals(findings: Iterable[Finding], *levels: str) -> list[Violation]:
    return [Violation(f.field, f.value, f.text, f.fix) for f in findings if f.level in levels]


def derive(recipe: Recipe, site: Site, run_dir: Path, *, local: bool = False) -> Plan:
    """Return the Plan of a run without findings and estimate.

    Args:
        local: run without Slurm. All agents run on this machine and share its GPUs.

    Raises:
        UsageError: the recipe cannot be placed on this site. Lists every reason.
    """
    recipe = resolve_auto_fields(recipe, None, site.device)
    requests, problems = requests_of(recipe, site, local=local)
    if problems:
        raise UsageError(problems)
    return place(recipe, site, run_dir, requests, local=local)


def requests_of(recipe: Recipe, site: Site, *, local: bool) -> tuple[list[ResourceRequest], list[Violation]]:
    """Return the resources that each role requests from the site, and every reason why the recipe cannot be placed.

    The requests are empty if the site cannot provide them. `local` is as in `derive`.
    """
    problems, requests = batch_job.problems(recipe, site) + measured_problems(site), []
    try:
        requests = resource_requests(recipe, site)
    except UsageError as error:
        problems += error.violations
    return requests, problems + (local_problems(site, requests) if local else [])


def place(recipe: Recipe, site: Site, run_dir: Path, requests: list[ResourceRequest], *, local: bool) -> Plan:
    """Return a Plan with all processes of a run on the nodes of `requests`. `local` is as in `derive`.

    Raises:
        UsageError: processes cannot have the ports that the recipe fixes.
    """
    builders = _builders(recipe, site, requests, local)
    replicas = place_inference(recipe, site, builders) if recipe.tenant is None else _tenant(recipe, builders[0])
    teachers = place_teacher(recipe, site, builders)
    # Engines that share GPUs with the trainer start first. vLLM refuses to start if its share of a GPU is not free, and
    # while it profiles, it counts memory that others allocate as its own.
    engines = [name for replica in replicas for name in replica.engines] if recipe.colocated else []
    cpus = batch_job.cpus_per_gpu(recipe, requests)
    if recipe.task == "tenants":
        trainer_gpus = _tenants(recipe, site, builders, cpus, replicas[0])
    else:
        trainer_gpus = _trainer(recipe, site, builders, cpus, engines)
    if recipe.samples:
        _control(recipe, builders[0], replicas, teachers)
        _environments(recipe, site, builders)
    nodes = finish(builders)
    if problems := port_problems(recipe, nodes, local=local):
        raise UsageError(problems)
    return Plan(
        schema=1,
        run=recipe.name,
        run_dir=str(run_dir),
        task=recipe.task,
        layout=recipe.deployment.layout,
        executor="local" if local else "slurm",
        device=site.device,
        python=site.python or "python3",
        job=batch_job.job_options(recipe, site, run_dir),
        groups=batch_job.groups(recipe, requests),
        nodes=nodes,
        replicas=tuple(replicas),
        totals=_totals(builders, requests, replicas, trainer_gpus, len(teachers)),
        env=batch_job.environment(recipe, site),
        library_path=site.library_path,
        interface=site.network.interface,
        hcas=site.network.hcas,
        addresses=site.network.addresses,
        pass_env=tuple(dict.fromkeys((*site.pass_env, *recipe.pass_env, *_keys(recipe), *_secrets(recipe)))),
        node_silent_s=site.node_silent_s,
        node_start_s=site.node_start_s,
        bad_node_hours=site.bad_node_hours,
        prometheus=site.prometheus,
        stall_timeout_s=recipe.orchestrator.stall_s,
        max_attempts=recipe.slurm.max_attempts,
    )


def _builders(recipe: Recipe, site: Site, requests: list[ResourceRequest], local: bool) -> list[NodeBuilder]:
    layout = recipe.deployment.layout
    shared = layout == "one_node"
    ports_of_node_0, engine_ports_of_node_0 = count(site.port_base), _engine_ports(recipe)
    taken = 0
    builders: list[NodeBuilder] = []
    for group, request in enumerate(requests):
        for i in range(request.nodes):
            builders.append(
                NodeBuilder(
                    index=0 if shared else len(builders),
                    group=group if layout == "het" else 0,
                    role=request.role,
                    index_in_group=i,
                    replica=i // request.nodes_per_replica if request.nodes_per_replica else None,
                    gpus=request.gpus,
                    first_gpu=taken if (local or shared) and not request.colocated else 0,
                    port_base=site.port_base,
                    free_ports=ports_of_node_0 if shared else count(site.port_base),
                    engine_ports=engine_ports_of_node_0 if shared else _engine_ports(recipe),
                )
            )
            taken += 0 if request.colocated else request.gpus
    return builders


def _engine_ports(recipe: Recipe) -> Iterator[int]:
    first = recipe.deployment.inference.backend_port
    return iter(()) if first is None else count(first)


def _trainer(recipe: Recipe, site: Site, builders: list[NodeBuilder], cpus: int, engines: list[str]) -> int:
    nodes = [builder for builder in builders if builder.role == "train"]
    world = sum(builder.gpus for builder in nodes)
    rank = 0
    for builder in nodes:
        for local in range(builder.gpus):
            builder.add(
                f"trainer-rank-{rank}",
                "trainer",
                trainer_command(
                    recipe, site, rank=rank, local_rank=local, local_world=builder.gpus, world=world, cpus=cpus
                ),
                gpus=(local,),
                restart="attempt",
                restart_group="trainer" if world > 1 else None,
                heartbeats=HeartbeatLimits(hang_timeout_s=recipe.trainer.hang_s),
                after=("orchestrator", *engines) if recipe.task == "rl" else (),
            )
            rank += 1
    return world


def _tenants(recipe: Recipe, site: Site, builders: list[NodeBuilder], cpus: int, replica: Replica) -> int:
    """Add the ranks of the Tinker service, and the tenant host to the head. Returns the number of ranks."""
    limit, hang = recipe.trainer.long_phase_timeout_s or LONG_PHASE_S, recipe.trainer.hang_s
    places = [(builder, gpu) for builder in builders if builder.role == "train" for gpu in range(builder.gpus)]
    world = len(places)
    for rank, (builder, gpu) in enumerate(places):
        builder.add(
            f"{TINKER}-rank-{rank}" if rank else TINKER,
            "tinker",
            tinker_command(
                recipe,
                site,
                replica.router,
                rank=rank,
                local_rank=gpu,
                local_world=builder.gpus,
                world=world,
                cpus=cpus,
            ),
            gpus=(gpu,),
            restart="unit" if world > 1 else "in_place",
            restart_group=TINKER if world > 1 else None,
            health=None if rank else Health(port="http", start_timeout_s=limit, hang_timeout_s=hang),
            heartbeats=HeartbeatLimits(hang_timeout_s=hang) if rank else None,
        )
    builders[0].add(
        TENANT_HOST,
        "tenant-host",
        tenant_host_command(replica.router),
        heartbeats=HeartbeatLimits(hang_timeout_s=recipe.orchestrator.hang_timeout_s),
        after=(TINKER, replica.router),
    )
    return world


def _tenant(recipe: Recipe, head: NodeBuilder) -> list[Replica]:
    """Add the gateway and the trainer of a tenant's run. Returns the gateway as a replica of one engine."""
    health = Health(port="http", path=STATUS_PATH, hang_timeout_s=recipe.inference.hang_timeout_s)
    head.add(GATEWAY, "router", gateway_command(), replica=0, health=health)
    heartbeats = HeartbeatLimits(hang_timeout_s=recipe.trainer.hang_s)
    # It resumes from its checkpoint beside the running orchestrator, also after a restart of the service.
    head.add("trainer-rank-0", "trainer", tenant_trainer_command(), heartbeats=heartbeats, after=("orchestrator",))
    return [Replica(index=0, router=GATEWAY, engines=(GATEWAY,), nodes=(head.index,))]


def _control(recipe: Recipe, head: NodeBuilder, replicas: list[Replica], teachers: list[str]) -> None:
    engines = [name for replica in replicas for name in replica.engines]
    routers = [replica.router for replica in replicas]
    heartbeats = HeartbeatLimits(hang_timeout_s=recipe.orchestrator.hang_timeout_s)
    head.add("orchestrator", "orchestrator", orchestrator_command(engines, routers, teachers), heartbeats=heartbeats)


def _environments(recipe: Recipe, site: Site, builders: Sequence[NodeBuilder]) -> None:
    """Assign environment workers to the environment nodes in turn, or to the head if there are none."""
    # Workers of one environment are spread over all nodes. Nodes are loaded alike, and an environment keeps most of its
    # workers when a node is lost.
    nodes = [builder for builder in builders if builder.role == "environments"] or builders[:1]
    kind = site.kind(nodes[0].role)
    workers = [(each.label, worker) for each in recipe.all_environments for worker in range(each.workers)]
    for number, (label, worker) in enumerate(workers):
        nodes[number % len(nodes)].add(
            f"environment-{label}-{worker}",
            "environment",
            environment_command(label, worker, kind.scratch if kind else None),
            heartbeats=HeartbeatLimits(hang_timeout_s=recipe.orchestrator.worker_hang_timeout_s),
            after=("orchestrator",),
        )


def _keys(recipe: Recipe) -> tuple[str, ...]:
    """Return the variables with the API key of a teacher that is served elsewhere."""
    teacher = recipe.teacher
    return (teacher.key_env,) if isinstance(teacher, ServedTeacher) and teacher.key_env else ()


def _secrets(recipe: Recipe) -> tuple[str, ...]:
    return tuple(name for each in recipe.all_environments if each.runtime is not None for name in each.runtime.secrets)


def _totals(
    builders: list[NodeBuilder],
    requests: list[ResourceRequest],
    replicas: list[Replica],
    trainer_gpus: int,
    teacher_engines: int,
) -> Totals:
    return Totals(
        nodes=len({builder.index for builder in builders}),
        spares=sum(request.spares for request in requests),
        gpus=count_gpus(requests),
        trainer_gpus=trainer_gpus,
        engines=sum(len(replica.engines) for replica in replicas),
        inference_nodes=len({b.index for b in builders if b.role in ("inference", "prefill", "decode")}),
        routers=len(replicas),
        teacher_engines=teacher_engines,
        environment_nodes=sum(builder.role == "environments" for builder in builders),
    )
