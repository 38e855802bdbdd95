"""The teacher's engines: planned as if the teacher were served by a recipe of its own, on nodes of its own.

They have no gate and no router: they keep the weights they load, and the orchestrator, their only client, deals its
requests to them itself.
"""

from __future__ import annotations

from primeslurm.plan.commands.engine import START_TIMEOUT_S, Engines
from primeslurm.plan.model import Health
from primeslurm.plan.placement.node_builder import NodeBuilder
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.sections.inference import EngineParallel, Inference
from primeslurm.recipe.sections.teacher import TeacherEngines
from primeslurm.recipe.sections.trainer import Model


def served(recipe: Recipe) -> Recipe | None:
    """Make the recipe that would serve the teacher; None if the run has no teacher engines.

    An engine must accept the longest trained sequence and the one token that every request has to ask for.
    """
    teacher = recipe.teacher
    if not isinstance(teacher, TeacherEngines):
        return None
    return Recipe(
        schema=1,
        name=recipe.name,
        task="serve",
        seed=recipe.seed,
        seq_len=recipe.seq_len,
        model=Model(path=teacher.path, dtype=teacher.dtype, max_len=recipe.seq_len + 1),
        inference=Inference(
            parallel=EngineParallel(tp=teacher.tp),
            quantization=teacher.quantization,
            gpu_memory_utilization=teacher.gpu_memory_utilization,
            kv_cache_bytes=teacher.kv_cache_bytes,
            max_num_batched_tokens=teacher.max_num_batched_tokens,
            env=teacher.env,
            vllm_extra=teacher.vllm_extra,
        ),
    )


def place_teacher(recipe: Recipe, site: Site, builders: list[NodeBuilder]) -> list[str]:
    """Put an engine on every `tp` GPUs of the teacher's nodes.

    Args:
        recipe: of the run.
        site: where it is to run.
        builders: all nodes; those of role teacher are filled.

    Returns:
        Names of the engines; none if the run has no teacher engines.
    """
    alone = served(recipe)
    if alone is None:
        return []
    tp = alone.inference.parallel.tp
    places = [
        (builder, first) for builder in builders if builder.role == "teacher" for first in range(0, builder.gpus, tp)
    ]
    command = Engines(alone, site.device, "engine", "${python}").command()
    names = [f"teacher-{number}" for number in range(len(places))]
    for name, (builder, first) in zip(names, places, strict=True):
        health = Health(port="http", start_timeout_s=START_TIMEOUT_S)
        builder.add(name, "teacher", command, gpus=range(first, first + tp), health=health)
    return names
