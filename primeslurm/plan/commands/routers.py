"""Processes in front of a replica's engines, for each type of router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.plan.commands import dynamo, kv_events, llmd
from primeslurm.plan.commands.command import Command, ReplicaEngines, long_options, url_of
from primeslurm.plan.supervision import Health
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import DynamoRouter, LlmdRouter, VllmRouter


@dataclass(frozen=True)
class Front:
    """A process in front of a replica's engines: a router or one of its helpers."""

    name: str
    command: Command
    health: Health
    after: Sequence[str] = ()
    beside: str | None = None  # Engine whose node it runs on. None: the replica's first node.


def router_name(replica: int) -> str:
    """Return the name of the process that clients of a replica send requests to, for every type of router."""
    return f"router-{replica}"


def fronts(recipe: Recipe, replica: int, workers: ReplicaEngines) -> list[Front]:
    """Return the processes in front of a replica. The one called `router_name` serves HTTP on its port `http`."""
    name = router_name(replica)
    match recipe.inference.router:
        case VllmRouter() as router:
            command = router_command(recipe, router, workers, name)
            return [Front(name, command, Health(port="health", path="/liveness"), workers.all)]
        case DynamoRouter() as router:
            return [Front(name, dynamo.frontend(router, replica), Health(port="http"))]
        case LlmdRouter() as router:
            return _llmd(router, replica, workers)


def _llmd(router: LlmdRouter, replica: int, workers: ReplicaEngines) -> list[Front]:
    picker = f"picker-{replica}"
    sidecars = {engine: f"sidecar-{engine}" for engine in workers.decode}
    up = Health(port="http")
    return [
        *(Front(sidecar, llmd.sidecar(engine), up, (engine,), beside=engine) for engine, sidecar in sidecars.items()),
        Front(picker, llmd.picker(router, workers, sidecars), Health(port="http", path="/metrics"), workers.all),
        Front(router_name(replica), llmd.envoy(picker), up, (picker, *sidecars.values())),
    ]


def router_command(recipe: Recipe, router: VllmRouter, workers: ReplicaEngines, name: str) -> Command:
    options: dict[str, object] = {"host": "${host}", "port": "${port:http}", "policy": router.policy}
    options |= _OPTIONS | {"request_timeout_secs": recipe.orchestrator.request_s}
    if workers.disaggregated:
        decode_policy = router.decode_policy or router.policy
        options |= {"vllm_pd_disaggregation": True, "prefill_policy": router.policy, "decode_policy": decode_policy}
    if recipe.samples and router.policy == "kv_aware" and not workers.disaggregated:
        # Otherwise a busy engine loses rollouts between two turns, whose answers it alone has cached.
        options["kv_aware_session_affinity_ttl_secs"] = 3600
    argv = ["${python}", "-m", "primeslurm.inference.router", "--name", name, "--attempt-dir", "${attempt_dir}"]
    argv += ["--health-port", "${port:health}", *long_options(options | router.extra)]
    if workers.disaggregated:
        argv += [part for name in workers.prefill for part in ("--prefill", url_of(name))]
        argv += [part for name in workers.decode for part in ("--decode", url_of(name))]
    else:
        argv += ["--worker-urls", *map(url_of, workers.engines)]
    if router.policy == "kv_aware":
        argv += kv_events.router_options(workers)
    # Below RUST_LOG=warn, it logs three lines per request.
    level = {"debug": "debug", "error": "error"}.get(recipe.logging.level, "warn")
    return Command(tuple(argv), {"RUST_LOG": level}, ("http", "metrics", "health"))


_OPTIONS: dict[str, object] = {
    "prometheus_host": "${host}",
    "prometheus_port": "${port:metrics}",
    # The router listens only after an engine is ready. By default it stops waiting for one after ten minutes.
    "worker_startup_timeout_secs": 7 * 86400,
    "worker_startup_check_interval": 1,
    # The router must drop a dead or outdated engine within about a second and take it back as fast. It retries nothing
    # between prefill and decode, so until then its clients see errors.
    "health_check_interval_secs": 1,
    "health_check_timeout_secs": 5,
    "health_failure_threshold": 1,
    "health_success_threshold": 1,
    "cb_failure_threshold": 2,
    "cb_success_threshold": 1,
    "cb_timeout_duration_secs": 2,
}
