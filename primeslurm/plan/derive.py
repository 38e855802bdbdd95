"""Recipe + Site -> Plan: which node does what, with which ports, GPUs and commands. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from primeslurm.errors import UsageError, Violation
from primeslurm.plan.commands import Command, EngineRole, engine_command, router_command
from primeslurm.plan.control import RENDEZVOUS_PORT, environment_command, orchestrator_command, trainer_command
from primeslurm.plan.model import (
    Health,
    HetGroup,
    JobOptions,
    Node,
    NodeRole,
    Plan,
    Process,
    Replica,
    Role,
    Totals,
)
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.inference import Disaggregated
from primeslurm.recipe.scheduling import Component
from primeslurm.recipe.site import NodeKind

ENGINE_READY = "/primeslurm/status"
"""Answers 200 as soon as an engine's HTTP server is up, current or not: `/health` waits for the current policy."""

_RENDEZVOUS_OFFSET = 500
"""torch listens for its ranks on every address of the host, so no node of an emulated cluster may prefer that port."""


@dataclass
class _Slot:
    """A node while it is being filled."""

    index: int
    group: int
    role: NodeRole
    index_in_group: int
    replica: int | None
    gpus: int
    first_gpu: int
    port_base: int
    port: int
    processes: list[Process] = field(default_factory=list)

    def add(
        self,
        name: str,
        role: Role,
        command: Command,
        *,
        gpus: Iterable[int] = (),
        replica: int | None = None,
        restart_attempt: bool = False,
        health: Health | None = None,
        after: Iterable[str] = (),
    ) -> None:
        ports = {}
        for port in command.ports:
            if port == RENDEZVOUS_PORT:
                ports[port] = self.port_base + _RENDEZVOUS_OFFSET
            else:
                ports[port] = self.port
                self.port += 1
        self.processes.append(
            Process(
                name=name,
                role=role,
                node=self.index,
                replica=replica,
                argv=command.argv,
                env=command.env,
                log=f"logs/{role}/{name}.log",
                ports=ports,
                gpus=tuple(self.first_gpu + gpu for gpu in gpus),
                restart="attempt" if restart_attempt else "in_place",
                health=health,
                after=tuple(after),
            )
        )


@dataclass(frozen=True)
class _Need:
    """What one role asks for."""

    role: NodeRole
    nodes: int
    gpus: int
    kind: NodeKind
    nodes_per_replica: int = 0


def derive(recipe: Recipe, site: Site, run_dir: Path, *, local: bool = False) -> Plan:
    """Work out the whole run. `local`: without Slurm, all nodes are agents on this one machine and share its GPUs.

    Raises:
        UsageError: the recipe cannot be placed on this site; every reason at once.
    """
    needs = _needs(recipe, site)
    if local:
        _check_local(site, needs)
    slots = _slots(recipe, site, needs, local)
    replicas = _inference(recipe, site, slots)
    trainer_gpus = _trainer(recipe, site, slots)
    if recipe.task == "rl":
        _control(recipe, site, slots, replicas)
    engines = sum(len(replica.engines) for replica in replicas)
    nodes = tuple(
        Node(
            index=s.index,
            group=s.group,
            role=s.role,
            index_in_group=s.index_in_group,
            processes=tuple(s.processes),
        )
        for s in slots
    )
    return Plan(
        schema=1,
        run=recipe.name,
        run_dir=str(run_dir),
        task=recipe.task,
        layout=recipe.deployment.layout,
        executor="local" if local else "slurm",
        device=site.device,
        python=site.python or "python3",
        job=_job(recipe, site),
        groups=_groups(recipe, site, needs, len(slots)),
        nodes=nodes,
        replicas=tuple(replicas),
        totals=Totals(
            nodes=len(slots),
            gpus=sum(slot.gpus for slot in slots),
            trainer_gpus=trainer_gpus,
            engines=engines,
            inference_nodes=sum(slot.role in ("inference", "prefill", "decode") for slot in slots),
            routers=len(replicas),
        ),
        env=_environment(site),
        library_path=site.library_path,
        interface=site.network.interface,
        addresses=site.network.addresses,
        stall_timeout_s=recipe.orchestrator.stall_timeout_s,
        max_attempts=recipe.slurm.max_attempts if recipe.slurm.requeue else 1,
    )


def _needs(recipe: Recipe, site: Site) -> list[_Need]:
    """Nodes and GPUs of each role, in het-group order. Raises UsageError."""
    deployment, inference = recipe.deployment, recipe.deployment.inference
    asked: list[tuple[NodeRole, str, int, int | None, int]] = []
    if recipe.task == "rl" and deployment.layout == "het":
        asked.append(("control", "deployment", 1, 0, 0))
    asked.append(("train", "deployment.train", deployment.train.nodes, deployment.train.gpus_per_node, 0))
    if recipe.task == "rl" and isinstance(inference, Disaggregated):
        for role in ("prefill", "decode"):
            group = getattr(inference, role)
            count = group.nodes * inference.num_replicas
            asked.append((role, f"deployment.inference.{role}", count, group.gpus_per_node, group.nodes))
    elif recipe.task == "rl":
        count = inference.nodes_per_replica * inference.num_replicas  # type: ignore[union-attr]
        per_replica = inference.nodes_per_replica  # type: ignore[union-attr]
        asked.append(("inference", "deployment.inference", count, inference.gpus_per_node, per_replica))  # type: ignore[union-attr]

    problems: list[Violation] = []
    needs: list[_Need] = []
    for role, where, count, gpus, per_replica in asked:
        kind = site.kind(role)
        if kind is None:
            why = f"site {site.name} has no nodes for role {role}"
            problems.append(Violation(where, "", why, f"add `{role}` or `default` under `nodes` of the site file"))
            continue
        gpus = kind.gpus if gpus is None else gpus
        if gpus > kind.gpus:
            why = f"nodes of partition {kind.partition} have {kind.gpus} GPUs"
            problems.append(Violation(f"{where}.gpus_per_node", str(gpus), why, f"nearest: {kind.gpus}"))
        if role != "control" and gpus == 0:
            problems.append(Violation(where, "", f"role {role} needs GPUs, partition {kind.partition} has none"))
        needs.append(_Need(role, count, gpus, kind, per_replica))
    problems += _engine_problems(recipe, needs) + _trainer_problems(recipe, needs)
    if deployment.layout == "single" and len({need.kind.partition for need in needs}) > 1:
        partitions = ", ".join(sorted({need.kind.partition for need in needs}))
        why = f"one allocation cannot span partitions {partitions}"
        problems.append(Violation("deployment.layout", "single", why, "use layout: het"))
    if problems:
        raise UsageError(problems)
    return needs


def _engine_problems(recipe: Recipe, needs: list[_Need]) -> list[Violation]:
    tp = recipe.inference.parallel.tp
    found = []
    for need in needs:
        if need.role in ("inference", "prefill", "decode") and need.gpus and need.gpus % tp:
            why = f"must divide the {need.gpus} GPUs of a {need.role} node"
            divisors = [d for d in range(1, need.gpus + 1) if need.gpus % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - tp))
            found.append(Violation("inference.parallel.tp", str(tp), why, f"nearest: {nearest}"))
    return found


def _trainer_problems(recipe: Recipe, needs: list[_Need]) -> list[Violation]:
    parallelism = recipe.trainer.parallelism
    world = next((need.nodes * need.gpus for need in needs if need.role == "train"), 0)
    found: list[Violation] = []
    if not world:
        return found
    fixed = parallelism.dp_replicate * parallelism.cp
    if world % fixed:
        why = f"dp_replicate x cp = {fixed} must divide the {world} trainer GPUs"
        found.append(
            Violation("trainer.parallelism", f"dp_replicate={parallelism.dp_replicate}, cp={parallelism.cp}", why)
        )
    elif (world // parallelism.dp_replicate) % parallelism.ep:
        shard = world // parallelism.dp_replicate
        divisors = [d for d in range(1, shard + 1) if shard % d == 0]
        nearest = min(divisors, key=lambda d: abs(d - parallelism.ep))
        why = f"must divide the {shard} GPUs of one FSDP group"
        found.append(Violation("trainer.parallelism.ep", str(parallelism.ep), why, f"nearest: {nearest}"))
    return found


def _check_local(site: Site, needs: list[_Need]) -> None:
    if site.device == "cuda":
        asked, there = sum(need.nodes * need.gpus for need in needs), max(kind.gpus for kind in site.nodes.values())
        if asked > there:
            why = f"the roles together ask for {asked} GPUs, this machine has {there}"
            raise UsageError([Violation("deployment", "", why, "lower gpus_per_node of a role")])


def _slots(recipe: Recipe, site: Site, needs: list[_Need], local: bool) -> list[_Slot]:
    single = recipe.deployment.layout == "single"
    slots: list[_Slot] = []
    for group, need in enumerate(needs):
        for i in range(need.nodes):
            replica = i // need.nodes_per_replica if need.nodes_per_replica else None
            first_gpu = sum(slot.gpus for slot in slots) if local else 0
            slots.append(
                _Slot(
                    index=len(slots),
                    group=0 if single else group,
                    role=need.role,
                    index_in_group=i,
                    replica=replica,
                    gpus=need.gpus,
                    first_gpu=first_gpu,
                    port_base=site.port_base,
                    port=site.port_base,
                )
            )
    return slots


def _inference(recipe: Recipe, site: Site, slots: list[_Slot]) -> list[Replica]:
    """Put one engine per data-parallel rank on every inference node, and a router on each replica's first node."""
    tp = recipe.inference.parallel.tp
    role_of: dict[NodeRole, EngineRole] = {"inference": "engine", "prefill": "prefill", "decode": "decode"}
    members: dict[int, list[_Slot]] = {}
    for slot in slots:
        if slot.replica is not None:
            members.setdefault(slot.replica, []).append(slot)
    replicas = []
    for index, nodes in sorted(members.items()):
        names: dict[EngineRole, list[str]] = {"engine": [], "prefill": [], "decode": []}
        for slot in nodes:
            role = role_of[slot.role]
            for first in range(0, slot.gpus, tp):
                name = f"{role}-r{index}-{len(names[role])}"
                names[role].append(name)
                slot.add(
                    name,
                    role,
                    engine_command(recipe, site.device, role, "${python}"),
                    gpus=range(first, first + tp),
                    replica=index,
                    health=Health(port="http", path=ENGINE_READY),
                )
        router = f"router-{index}"
        engines = tuple(name for group in names.values() for name in group)
        nodes[0].add(
            router,
            "router",
            router_command(recipe, "${python}", names["engine"], names["prefill"], names["decode"]),
            replica=index,
            health=Health(port="http", path="/liveness"),
            after=engines,
        )
        replicas.append(Replica(index=index, router=router, engines=engines, nodes=tuple(slot.index for slot in nodes)))
    return replicas


def _trainer(recipe: Recipe, site: Site, slots: list[_Slot]) -> int:
    nodes = [slot for slot in slots if slot.role == "train"]
    world = sum(slot.gpus for slot in nodes)
    rank = 0
    for slot in nodes:
        for local in range(slot.gpus):
            slot.add(
                f"trainer-rank-{rank}",
                "trainer",
                trainer_command(recipe, site, rank=rank, local_rank=local, world=world),
                gpus=(local,),
                restart_attempt=True,
                after=("orchestrator",) if recipe.task == "rl" else (),
            )
            rank += 1
    return world


def _control(recipe: Recipe, site: Site, slots: list[_Slot], replicas: list[Replica]) -> None:
    head = slots[0]
    engines = [name for replica in replicas for name in replica.engines]
    head.add("orchestrator", "orchestrator", orchestrator_command(recipe, engines, [r.router for r in replicas]))
    for environment in recipe.environments:
        for worker in range(environment.workers):
            name = f"environment-{environment.label}-{worker}"
            head.add(name, "environment", environment_command(environment.label, worker), after=("orchestrator",))


def _groups(recipe: Recipe, site: Site, needs: list[_Need], total: int) -> tuple[HetGroup, ...]:
    if recipe.deployment.layout == "single":
        widest = max(needs, key=lambda need: need.gpus)
        return (_group(recipe, 0, "all", total, widest, recipe.slurm.train),)
    return tuple(
        _group(recipe, index, need.role, need.nodes, need, getattr(recipe.slurm, need.role))
        for index, need in enumerate(needs)
    )


def _group(recipe: Recipe, index: int, name: str, nodes: int, need: _Need, component: Component) -> HetGroup:
    kind = need.kind
    return HetGroup(
        index=index,
        name=name,
        nodes=nodes,
        partition=component.partition or kind.partition,
        gres=f"{kind.gres}:{need.gpus}" if need.gpus else None,
        cpus_per_task=component.cpus_per_task or kind.cpus,
        mem=component.mem or kind.mem,
        constraint=component.constraint,
    )


def _job(recipe: Recipe, site: Site) -> JobOptions:
    slurm = recipe.slurm
    return JobOptions(
        name=recipe.name,
        time=slurm.time,
        account=slurm.account or site.account,
        qos=slurm.qos or site.qos,
        reservation=slurm.reservation,
        comment=slurm.comment,
        exclude=slurm.exclude,
        requeue=slurm.requeue,
        signal_s=slurm.checkpoint_signal_s,
        modules=site.modules,
        prologue=site.prologue,
    )


def _environment(site: Site) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1", "TMPDIR": "${tmp}"}
    if site.network.interface:
        env |= {"GLOO_SOCKET_IFNAME": site.network.interface, "NCCL_SOCKET_IFNAME": site.network.interface}
    if site.network.nccl_ib_hca:
        env["NCCL_IB_HCA"] = site.network.nccl_ib_hca
    if site.network.ucx_net_devices:
        env["UCX_NET_DEVICES"] = site.network.ucx_net_devices
    if site.device == "cpu":
        # One thread a process: an emulated cluster puts many "nodes" on few cores.
        env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_CONFIG_ROOT": "${tmp}/vllm"}
    return env | site.env
