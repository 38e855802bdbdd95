"""NVIDIA Dynamo without etcd and NATS: processes find each other through files and use TCP and ZeroMQ."""

from __future__ import annotations

from primeslurm.plan.commands.command import Command, EngineRole, long_options
from primeslurm.recipe.sections.routers import DynamoRouter

WORKER = "dynamo.vllm"
_MODES: dict[EngineRole, str] = {"engine": "agg", "prefill": "prefill", "decode": "decode"}
# Options of vLLM's HTTP server, which a Dynamo worker does not have
_SERVER_OPTIONS = ("host", "port", "enable_scale_out", "middleware", "disable_uvicorn_access_log")


def frontend(router: DynamoRouter, replica: int) -> Command:
    options: dict[str, object] = {"http_host": "${host}", "http_port": "${port:http}", "router_mode": router.mode}
    if router.session_ttl_s is not None:
        options["router_session_affinity_ttl_secs"] = router.session_ttl_s
    argv = ("${python}", "-m", "dynamo.frontend", *long_options(_PLANES | options | router.extra))
    # This enables the route with token ids as input and output.
    env = _env(replica) | {"DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1"}
    return Command(argv, env, ("http",))


def worker_options(options: dict[str, object], role: EngineRole) -> dict[str, object]:
    """Return the options of a Dynamo worker: those of vLLM, except the server's."""
    worker = {name: value for name, value in options.items() if name not in _SERVER_OPTIONS}
    return worker | _PLANES | {"disaggregation_mode": _MODES[role]}


def worker_env(replica: int) -> dict[str, str]:
    """Return the environment through which the frontend finds a worker, and the address of the worker's `/health`."""
    return _env(replica) | {"DYN_SYSTEM_HOST": "${host}", "DYN_SYSTEM_PORT": "${port:http}"}


def _env(replica: int) -> dict[str, str]:
    # Replicas share the directory, so each needs its own namespace.
    return {"DYN_FILE_KV": "${attempt_dir}/dynamo", "DYN_NAMESPACE": f"replica-{replica}"}


_PLANES: dict[str, object] = {"discovery_backend": "file", "request_plane": "tcp", "event_plane": "zmq"}
