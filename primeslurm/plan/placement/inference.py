"""Engines and routers on the inference nodes, and the teacher's engines on theirs.

`teacher_recipe` describes the teacher's engines. They keep the weights that they load, so they need no version gate.
They have no router: the orchestrator is their only client and balances its requests itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from primeslurm.plan.commands import kv
from primeslurm.plan.commands.command import ENGINE_ROLES, EngineRole, ReplicaEngines
from primeslurm.plan.commands.engine import DataParallel, Engines
from primeslurm.plan.commands.engine_defaults import START_S
from primeslurm.plan.commands.routers import fronts, router_name
from primeslurm.plan.model import Replica
from primeslurm.plan.placement.node_builder import NodeBuilder
from primeslurm.plan.supervision import Health
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.sections.deployment import Disaggregated
from primeslurm.recipe.sections.inference import EngineParallel, Inference
from primeslurm.recipe.sections.kv_offload import MooncakeOffload
from primeslurm.recipe.sections.teacher import TeacherEngines
from primeslurm.recipe.sections.trainer import Model
from primeslurm.wire.names import STATUS_PATH


@dataclass(frozen=True)
class _Group:
    """Nodes whose engines may share experts: those of a replica, or one of its prefill or decode groups."""

    role: EngineRole
    builders: Sequence[NodeBuilder]


def place_inference(recipe: Recipe, site: Site, builders: list[NodeBuilder]) -> list[Replica]:
    """Put one engine per data-parallel rank on every inference node, and a router on the first node of each replica."""
    members: dict[int, list[NodeBuilder]] = {}
    for builder in builders:
        if builder.replica is not None:
            members.setdefault(builder.replica, []).append(builder)
    _place_store(recipe, site, builders[0], [builder for nodes in members.values() for builder in nodes])
    return [_place_replica(recipe, site, index, nodes) for index, nodes in sorted(members.items())]


def _place_store(recipe: Recipe, site: Site, head: NodeBuilder, builders: list[NodeBuilder]) -> None:
    """Put a client of the Mooncake store on every inference node, and the store's master on the head node."""
    # All clients and engines know the master's address. On another node than the head's, its loss would end an attempt
    # that other replicas could continue.
    offload = recipe.inference.kv_offload
    if not isinstance(offload, MooncakeOffload) or not builders:
        return
    head.add(kv.STORE_MASTER, "store", kv.store_master(recipe), health=Health(port="http"))
    first_of_node = {builder.index: builder for builder in reversed(builders)}
    for index, builder in sorted(first_of_node.items()):
        builder.add(
            f"store-{index}",
            "store",
            kv.store_client(offload, site.device),
            health=Health(port="http"),
            after=(kv.STORE_MASTER,),
        )


def _stores(recipe: Recipe, builder: NodeBuilder) -> tuple[str, ...]:
    return (f"store-{builder.index}",) if isinstance(recipe.inference.kv_offload, MooncakeOffload) else ()


def _place_replica(recipe: Recipe, site: Site, index: int, nodes: list[NodeBuilder]) -> Replica:
    names: dict[EngineRole, list[str]] = {"engine": [], "prefill": [], "decode": []}
    for group in _groups(recipe, nodes):
        _place_group(recipe, site, index, group, names[group.role])
    workers = ReplicaEngines(tuple(names["engine"]), tuple(names["prefill"]), tuple(names["decode"]))
    for front in fronts(recipe, index, workers):
        builder = next((builder for builder in nodes if builder.holds(front.beside)), nodes[0])
        builder.add(
            front.name,
            "router",
            front.command,
            replica=index,
            health=front.health,
            after=front.after,
            http_port=recipe.deployment.inference.router_port if front.name == router_name(index) else None,
        )
    return Replica(
        index=index,
        router=router_name(index),
        engines=workers.all,
        nodes=tuple(dict.fromkeys(builder.index for builder in nodes)),
    )


def _groups(recipe: Recipe, nodes: list[NodeBuilder]) -> Iterator[_Group]:
    inference = recipe.deployment.inference
    sizes: dict[EngineRole, int] = {"engine": len(nodes)}
    if isinstance(inference, Disaggregated):
        sizes = {"prefill": inference.prefill.nodes_per_replica, "decode": inference.decode.nodes_per_replica}
    for role, size in sizes.items():
        role_nodes = [builder for builder in nodes if ENGINE_ROLES[builder.role] == role]
        for first in range(0, len(role_nodes), size):
            yield _Group(role, role_nodes[first : first + size])


def _place_group(recipe: Recipe, site: Site, replica: int, group: _Group, names: list[str]) -> None:
    """Put engines on nodes in rank order. With expert parallelism they are the ranks of data-parallel groups."""
    tp, role = recipe.inference.parallel.tp, group.role
    places = [(builder, first) for builder in group.builders for first in range(0, builder.gpus, tp)]
    dp = (recipe.inference.parallel.dp or len(places)) if recipe.inference.expert_parallel else 1
    engines = Engines(recipe, site.device, role, "${python}")
    start = len(names)
    for number, (builder, first) in enumerate(places):
        name = f"{role}-r{replica}-{start + number}"
        rank = number % dp
        head = f"{role}-r{replica}-{start + number - rank}"
        names.append(name)
        builder.add(
            name,
            role,
            engines.command(DataParallel(dp, rank, head), replica),
            gpus=range(first, first + tp),
            replica=replica,
            restart="unit" if dp > 1 else "in_place",
            restart_group=f"{role}-r{replica}-g{(start + number) // dp}" if dp > 1 else None,
            health=Health(
                port="http",
                path=STATUS_PATH if recipe.samples else "/health",
                start_timeout_s=recipe.inference.start_timeout_s or START_S,
                hang_timeout_s=recipe.inference.hang_timeout_s,
            ),
            after=_stores(recipe, builder),
            http_port=next(builder.engine_ports, None),
        )


def teacher_recipe(recipe: Recipe) -> Recipe | None:
    """Return the recipe that would serve the teacher; None if the run has no teacher engines."""
    # An engine must accept the longest trained sequence and the one token that every request has to generate.
    teacher = recipe.teacher
    if not isinstance(teacher, TeacherEngines):
        return None
    return Recipe(
        schema=1,
        name=recipe.name,
        task="serve",
        seed=recipe.seed,
        seq_len=recipe.seq_len,
        logging=recipe.logging,
        model=Model(path=teacher.path, dtype=teacher.dtype, max_len=recipe.seq_len + 1),
        inference=Inference(
            parallel=EngineParallel(tp=teacher.tp),
            quantization=teacher.quantization,
            gpu_memory_utilization=teacher.gpu_memory_utilization,
            kv_cache_bytes=teacher.kv_cache_bytes,
            max_num_batched_tokens=teacher.max_num_batched_tokens,
            start_timeout_s=recipe.inference.start_timeout_s,
            env=teacher.env,
            vllm_extra=teacher.vllm_extra,
        ),
    )


def place_teacher(recipe: Recipe, site: Site, builders: list[NodeBuilder]) -> list[str]:
    """Put an engine on every `tp` GPUs of the teacher's nodes. Returns the names of the engines."""
    serving = teacher_recipe(recipe)
    if serving is None:
        return []
    tp = serving.inference.parallel.tp
    places = [
        (builder, first) for builder in builders if builder.role == "teacher" for first in range(0, builder.gpus, tp)
    ]
    command = Engines(serving, site.device, "engine", "${python}").command()
    names = [f"teacher-{number}" for number in range(len(places))]
    for name, (builder, first) in zip(names, places, strict=True):
        health = Health(port="http", start_timeout_s=serving.inference.start_timeout_s or START_S)
        builder.add(name, "teacher", command, gpus=range(first, first + tp), health=health)
    return names
