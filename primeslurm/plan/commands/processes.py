"""Commands of primeslurm's own processes: orchestrator, environment workers, trainer ranks."""

from __future__ import annotations

from primeslurm.plan.commands.command import COMPILED_CODE, GIN_OFF, RENDEZVOUS_PORT, Command, url_of
from primeslurm.plan.gpus import ALLOC_CONF, EXPANDABLE
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.wire.names import LOCAL_CHECKPOINTS

RECIPE = "${run_dir}/recipe.resolved.json"
# Only router and engine of a tenant's run
GATEWAY = "gateway"
_OF_RUN = ("--recipe", RECIPE, "--run-dir", "${run_dir}", "--attempt", "${attempt}")
WORKER = "primeslurm.orchestrator.worker.main"
# Names of the two processes of a deployment that tenants share
TINKER, TENANT_HOST = "tinker", "tenant-host"
PRELOADED = "primeslurm.orchestrator.worker.preload"
# Rollouts are received into memory with pages of 2 MiB, if the kernel offers them on request. With pages of 4 KiB, half
# of the time goes into allocating and freeing them. glibc before 2.35 and other C libraries ignore this.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def orchestrator_command(engines: list[str], routers: list[str], teachers: list[str]) -> Command:
    argv: tuple[str, ...] = (
        *("${python}", "-m", "primeslurm.orchestrator", *_OF_RUN, "--run-id", "${run_id}"),
        *("--bind", "tcp://${host}:${port:wire}", "--env-bind", "tcp://${host}:${port:envs}"),
        *("--routers", ",".join(routers), "--engines", ",".join(engines)),  # names, because addresses may change
    )
    if teachers:
        argv += ("--teachers", ",".join(teachers))
    return Command(argv=argv, env=HUGE_PAGES, ports=("wire", "envs"))


def gateway_command() -> Command:
    """Return the command of the process that passes a tenant's requests on to the deployment's engines."""
    argv = ("${python}", "-m", "primeslurm.tenants.gateway", "--recipe", RECIPE, "--host", "${host}")
    return Command(argv=(*argv, "--port", "${port:http}"), env={}, ports=("http",))


def tenant_trainer_command() -> Command:
    """Return the command of the process that trains a tenant's adapter in the deployment's Tinker service."""
    argv = ("${python}", "-m", "primeslurm.tenants.trainer", *_OF_RUN, "--orchestrator")
    return Command(argv=(*argv, "tcp://${addr:orchestrator:wire}"), env={}, ports=())


def environment_command(label: str, worker: int, scratch: str | None = None) -> Command:
    """Return the command of one worker of an environment. `scratch` is a local directory for files of rollouts."""
    argv = (
        *("${python}", "-m", WORKER, "--recipe", RECIPE, "--environment", label, "--worker", str(worker)),
        *("--orchestrator", "tcp://${addr:orchestrator:envs}", "--attempt-dir", "${attempt_dir}", "--node", "${node}"),
    )
    env = {"VF_RUN_ID": "${run_id}"}  # verifiers names a run's containers and hosted sandboxes after it
    if scratch is None:
        return Command(argv=argv, env=env, ports=(), imports=(PRELOADED,))
    directory = f"{scratch.rstrip('/')}/primeslurm-${{run_id}}-n${{node}}-environments-${{key}}"
    return Command(argv=argv, env={**env, "TMPDIR": directory}, ports=(), scratch=(directory,), imports=(PRELOADED,))


def trainer_command(
    recipe: Recipe, site: Site, *, rank: int, local_rank: int, local_world: int, world: int, cpus: int
) -> Command:
    """Return the command of one trainer rank: one process, one GPU, one log."""
    argv: tuple[str, ...] = ("${python}", "-m", "primeslurm.trainer", *_OF_RUN, "--device", site.device)
    if recipe.task == "rl":
        argv += ("--orchestrator", "tcp://${addr:orchestrator:wire}")
    env = _rank_env(recipe, site, "trainer-rank-0", rank, local_rank, local_world, world, cpus)
    if recipe.trainer.compile or site.device == "cuda":
        env |= COMPILED_CODE
    if site.device == "cuda":
        if not any(name in site.env or name in (*site.pass_env, *recipe.pass_env) for name in ALLOC_CONF):
            # Without it, rows of different lengths fragment memory: 31 of 140 GB with GLM-5's longest rows.
            env[ALLOC_CONF[0]] = EXPANDABLE
        split = recipe.trainer.parallelism
        if split.ep_backend == "deepep" and local_world % split.ep == 0:
            # All experts are reachable by NVLink. DeepEP would still require NCCL's RDMA, which a host may lack.
            env |= {} if GIN_OFF in site.env else {GIN_OFF: "1"}
    copies: tuple[str, ...] = ()
    if recipe.checkpoint.local:
        copies = (f"{recipe.checkpoint.local.rstrip('/')}/primeslurm-${{run_id}}-n${{node}}-checkpoint-${{key}}",)
        env[LOCAL_CHECKPOINTS] = copies[0]
    return Command(argv=argv, env=env, ports=(RENDEZVOUS_PORT,) if rank == 0 else (), scratch=copies)


def _rank_env(
    recipe: Recipe, site: Site, first: str, rank: int, local_rank: int, local_world: int, world: int, cpus: int
) -> dict[str, str]:
    """Return the variables of one of `world` ranks that meet at the process `first`."""
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": f"${{host:{first}}}",
        "MASTER_PORT": f"${{port:{first}:{RENDEZVOUS_PORT}}}",
    }
    if site.device == "cuda":  # NCCL's watchdog must not be faster than our timeouts
        env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(round(PhaseLimits.of(recipe).control_s))
        # By default, each rank would use all cores of the node for the optimizer step in host memory.
        env |= {} if "OMP_NUM_THREADS" in site.env else {"OMP_NUM_THREADS": str(cpus)}
    return env


def tinker_command(
    recipe: Recipe, site: Site, router: str, *, rank: int, local_rank: int, local_world: int, world: int, cpus: int
) -> Command:
    """Return the command of one rank of a deployment's Tinker service, whose clients sample through a router."""
    argv: tuple[str, ...] = ("${python}", "-m", "primeslurm.tinker", "--recipe", RECIPE, "--run-dir", "${run_dir}")
    env = COMPILED_CODE if site.device == "cuda" else {}
    if world > 1:
        env = env | _rank_env(recipe, site, TINKER, rank, local_rank, local_world, world, cpus)
    if rank:
        return Command(argv=argv, env=env, ports=())
    argv += ("--host", "${host}", "--port", "${port:http}", "--engines", url_of(router))
    return Command(argv=argv, env=env, ports=("http", RENDEZVOUS_PORT) if world > 1 else ("http",))


def tenant_host_command(router: str) -> Command:
    """Return the command of the process that runs the tenants of a deployment."""
    argv = (
        *("${python}", "-m", "primeslurm.api.tenants.host_process", "--run-dir", "${run_dir}"),
        *("--service", url_of(TINKER), "--router", url_of(router)),
    )
    return Command(argv=argv, env={}, ports=())
