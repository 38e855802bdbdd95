"""Commands of the processes that are our own: orchestrator, environment workers, trainer ranks."""

from __future__ import annotations

from primeslurm.models import family_of
from primeslurm.plan.commands.command import COMPILED_CODE, GIN_OFF, Command
from primeslurm.plan.memory.gpus import ALLOC_CONF, EXPANDABLE
from primeslurm.plan.placement.node_builder import RENDEZVOUS_PORT
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.wire.names import LOCAL_CHECKPOINTS

RECIPE = "${run_dir}/recipe.resolved.json"
WORKER = "primeslurm.orchestrator.worker.main"
PRELOADED = "primeslurm.orchestrator.worker.preload"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Rollouts are received into memory in pages of 2 MiB where the kernel has them on request: in pages of 4 KiB half of
the time goes into making and freeing them. Other C libraries, and a glibc before 2.35, do not heed it."""


def orchestrator_command(engines: list[str], routers: list[str], teachers: list[str]) -> Command:
    """Make the command of the one orchestrator, on the head node, from the names of whom it talks to."""
    argv: tuple[str, ...] = (
        "${python}",
        "-m",
        "primeslurm.orchestrator",
        "--recipe",
        RECIPE,
        "--run-dir",
        "${run_dir}",
        "--attempt",
        "${attempt}",
        "--run-id",
        "${run_id}",
        "--bind",
        "tcp://${host}:${port:wire}",
        "--env-bind",
        "tcp://${host}:${port:envs}",
        "--routers",
        ",".join(routers),  # names: where they are is looked up, and may change
        "--engines",
        ",".join(engines),
    )
    if teachers:
        argv += ("--teachers", ",".join(teachers))
    return Command(argv=argv, env=HUGE_PAGES, ports=("wire", "envs"))


def environment_command(label: str, worker: int, scratch: str | None = None) -> Command:
    """Make the command of one worker process of one environment.

    Args:
        label: the environment's.
        worker: which of its workers.
        scratch: directory on the nodes' own disks for what rollouts write. Default: the temporary one.
    """
    argv = (
        "${python}",
        "-m",
        WORKER,
        "--recipe",
        RECIPE,
        "--environment",
        label,
        "--worker",
        str(worker),
        "--orchestrator",
        "tcp://${addr:orchestrator:envs}",
        "--attempt-dir",
        "${attempt_dir}",
        "--node",
        "${node}",
    )
    env = {"VF_RUN_ID": "${run_id}"}  # what verifiers names a run's containers and hosted sandboxes by
    if scratch is None:
        return Command(argv=argv, env=env, ports=(), imports=(PRELOADED,))
    own = f"{scratch.rstrip('/')}/primeslurm-${{run_id}}-n${{node}}-environments-${{key}}"
    return Command(argv=argv, env={**env, "TMPDIR": own}, ports=(), scratch=(own,), imports=(PRELOADED,))


def decided(recipe: Recipe, model_type: str | None, device: str) -> Recipe:
    """Return the recipe with `trainer.compile` true or false, where it leaves that open.

    Args:
        recipe: of the run.
        model_type: of config.json; None if it is not known.
        device: that trainer ranks compute on.
    """
    if recipe.trainer.compile is not None:
        return recipe
    value = _compiles(recipe, model_type, device)
    return recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"compile": value})})


def _compiles(recipe: Recipe, model_type: str | None, device: str) -> bool:
    trainer = recipe.trainer
    if device != "cuda" or recipe.model.dtype != "bfloat16" or trainer.parallelism.ep_backend == "deepep":
        return False
    family = family_of(model_type) if model_type and recipe.model.impl != "hf" and recipe.model.vlm is None else None
    ran = family.model_types[model_type].compiled_with if family and model_type else None
    cp_style = trainer.parallelism.cp_style if trainer.parallelism.cp > 1 else None
    asked = {"fp8": trainer.fp8, "lora": trainer.lora, "router_replay": trainer.router_replay}
    asked |= {"cp": cp_style == "ulysses", "all-gathered cp": cp_style == "allgather"}
    asked |= {"one expert after the other": not trainer.grouped_mm}
    return ran is not None and {mode for mode, on in asked.items() if on} <= ran


def trainer_command(
    recipe: Recipe, site: Site, *, rank: int, local_rank: int, local_world: int, world: int, cpus: int
) -> Command:
    """Make the command of one trainer rank: one process, one GPU, one log.

    Args:
        recipe: of the run.
        site: where it runs.
        rank: among all.
        local_rank: on its node.
        local_world: ranks on its node.
        world: ranks in all.
        cpus: cores for each rank.
    """
    argv: tuple[str, ...] = (
        "${python}",
        "-m",
        "primeslurm.trainer",
        "--recipe",
        RECIPE,
        "--run-dir",
        "${run_dir}",
        "--attempt",
        "${attempt}",
        "--device",
        site.device,
    )
    if recipe.task == "rl":
        argv += ("--orchestrator", "tcp://${addr:orchestrator:wire}")
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "${host:trainer-rank-0}",
        "MASTER_PORT": "${port:trainer-rank-0:master}",
    }
    if recipe.trainer.compile or site.device == "cuda":
        env |= COMPILED_CODE
    if site.device == "cuda":  # NCCL's watchdog is no quicker than the limits of this product
        env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(round(PhaseLimits.of(recipe).control_s))
        # Of themselves, each of a node's ranks would take all of its cores for the optimizer's step in host memory.
        env |= {} if "OMP_NUM_THREADS" in site.env else {"OMP_NUM_THREADS": str(cpus)}
        if not any(name in site.env or name in (*site.pass_env, *recipe.pass_env) for name in ALLOC_CONF):
            # Rows of other lengths each step leave memory in pieces otherwise: 31 of 140 GB at GLM-5's longest.
            env[ALLOC_CONF[0]] = EXPANDABLE
        split = recipe.trainer.parallelism
        if split.ep_backend == "deepep" and local_world % split.ep == 0:
            # Experts are on one node, reached by NVLink; DeepEP would insist on NCCL's RDMA, which a host may lack.
            env |= {} if GIN_OFF in site.env else {GIN_OFF: "1"}
    copies: tuple[str, ...] = ()
    if recipe.checkpoint.local:
        copies = (f"{recipe.checkpoint.local.rstrip('/')}/primeslurm-${{run_id}}-n${{node}}-checkpoint-${{key}}",)
        env[LOCAL_CHECKPOINTS] = copies[0]
    return Command(argv=argv, env=env, ports=(RENDEZVOUS_PORT,) if rank == 0 else (), scratch=copies)
