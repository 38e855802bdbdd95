"""Engines and routers on the inference nodes: who shares experts with whom, and which router stands in front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from primeslurm.plan import kv
from primeslurm.plan.commands import EngineRole, Workers
from primeslurm.plan.engine_command import START_TIMEOUT_S, DataParallel, Engines
from primeslurm.plan.model import Health, NodeRole, Replica
from primeslurm.plan.routers import fronts, router_name
from primeslurm.plan.slots import Slot
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.deployment import Disaggregated
from primeslurm.recipe.kv import MooncakeOffload

ENGINE_READY = "/primeslurm/status"
"""Answers 200 as soon as an engine's HTTP server is up, current or not: `/health` waits for the current policy.
Only engines that are trained for have it."""

ROLE_OF: dict[NodeRole, EngineRole] = {"inference": "engine", "prefill": "prefill", "decode": "decode"}


@dataclass(frozen=True)
class _Group:
    """Nodes whose engines share the experts, if they do: a replica's, or one of its prefill or decode groups."""

    role: EngineRole
    slots: Sequence[Slot]


def place_inference(recipe: Recipe, site: Site, slots: list[Slot]) -> list[Replica]:
    """Put one engine per data-parallel rank on every inference node, and a router on each replica's first node."""
    members: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.replica is not None:
            members.setdefault(slot.replica, []).append(slot)
    _place_store(recipe, site, [slot for nodes in members.values() for slot in nodes])
    return [_place_replica(recipe, site, index, nodes) for index, nodes in sorted(members.items())]


def _place_store(recipe: Recipe, site: Site, slots: list[Slot]) -> None:
    """A client of the Mooncake store on every inference node, and its master on the first one."""
    offload = recipe.inference.kv_offload
    if not isinstance(offload, MooncakeOffload) or not slots:
        return
    first = min(slots, key=lambda slot: slot.index)
    first.add(kv.STORE_MASTER, "store", kv.store_master(recipe), health=Health(port="http"))
    for slot in slots:
        slot.add(
            f"store-{slot.index}",
            "store",
            kv.store_client(offload, site.device),
            health=Health(port="http"),
            after=(kv.STORE_MASTER,),
        )


def _stores(slot: Slot) -> tuple[str, ...]:
    """What an engine on this node waits for: the store, once the node gives its share to it."""
    return tuple(process.name for process in slot.processes if process.role == "store")


def _place_replica(recipe: Recipe, site: Site, index: int, nodes: list[Slot]) -> Replica:
    names: dict[EngineRole, list[str]] = {"engine": [], "prefill": [], "decode": []}
    for group in _groups(recipe, nodes):
        _place_group(recipe, site, index, group, names[group.role])
    workers = Workers(tuple(names["engine"]), tuple(names["prefill"]), tuple(names["decode"]))
    for front in fronts(recipe, index, workers):
        slot = next((slot for slot in nodes if slot.holds(front.beside)), nodes[0])
        slot.add(front.name, "router", front.command, replica=index, health=front.health, after=front.after)
    return Replica(
        index=index,
        router=router_name(index),
        engines=workers.all,
        nodes=tuple(slot.index for slot in nodes),
    )


def _groups(recipe: Recipe, nodes: list[Slot]) -> Iterator[_Group]:
    shape = recipe.deployment.inference
    sizes: dict[EngineRole, int] = {"engine": len(nodes)}
    if isinstance(shape, Disaggregated):
        sizes = {"prefill": shape.prefill.nodes_per_replica, "decode": shape.decode.nodes_per_replica}
    for role, size in sizes.items():
        own = [slot for slot in nodes if ROLE_OF[slot.role] == role]
        for first in range(0, len(own), size):
            yield _Group(role, own[first : first + size])


def _place_group(recipe: Recipe, site: Site, replica: int, group: _Group, names: list[str]) -> None:
    """Engines in rank order, with expert parallelism as data-parallel ranks of one unit."""
    tp, role = recipe.inference.parallel.tp, group.role
    places = [(slot, first) for slot in group.slots for first in range(0, slot.gpus, tp)]
    dp = (recipe.inference.parallel.dp or len(places)) if recipe.inference.expert_parallel else 1
    engines = Engines(recipe, site.device, role, "${python}")
    start = len(names)
    for number, (slot, first) in enumerate(places):
        name = f"{role}-r{replica}-{start + number}"
        rank = number % dp
        head = f"{role}-r{replica}-{start + number - rank}"
        names.append(name)
        slot.add(
            name,
            role,
            engines.command(DataParallel(dp, rank, head), replica),
            gpus=range(first, first + tp),
            replica=replica,
            restart="unit" if dp > 1 else "in_place",
            unit=f"{role}-r{replica}-g{(start + number) // dp}" if dp > 1 else None,
            health=Health(
                port="http",
                path=ENGINE_READY if recipe.task == "rl" else "/health",
                start_timeout_s=START_TIMEOUT_S,
                hang_timeout_s=recipe.inference.hang_timeout_s,
            ),
            after=_stores(slot),
        )
