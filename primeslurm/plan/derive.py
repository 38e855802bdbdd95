"""Recipe + Site -> Plan: which node does what, with which ports, GPUs and commands. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from primeslurm.plan.commands import Command, EngineRole, engine_command, router_command
from primeslurm.plan.control import RENDEZVOUS_PORT, environment_command, orchestrator_command, trainer_command
from primeslurm.plan.jobs import check_job, environment_of, groups_of, job_of
from primeslurm.plan.model import (
    Health,
    Node,
    NodeRole,
    Plan,
    Process,
    Replica,
    Role,
    Totals,
)
from primeslurm.plan.needs import Need, check_local, needs_of
from primeslurm.recipe import Recipe, Site

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


def derive(recipe: Recipe, site: Site, run_dir: Path, *, local: bool = False) -> Plan:
    """Work out the whole run. `local`: without Slurm, all nodes are agents on this one machine and share its GPUs.

    Raises:
        UsageError: the recipe cannot be placed on this site; every reason at once.
    """
    check_job(recipe, site)
    needs = needs_of(recipe, site)
    if local:
        check_local(site, needs)
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
        job=job_of(recipe, site, str(run_dir)),
        groups=groups_of(recipe, site, needs, len(slots)),
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
        env=environment_of(site),
        library_path=site.library_path,
        interface=site.network.interface,
        addresses=site.network.addresses,
        pass_env=tuple(dict.fromkeys((*site.pass_env, *recipe.pass_env))),
        stall_timeout_s=recipe.orchestrator.stall_timeout_s,
        max_attempts=recipe.slurm.max_attempts if recipe.slurm.requeue else 1,
    )


def _slots(recipe: Recipe, site: Site, needs: list[Need], local: bool) -> list[_Slot]:
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
