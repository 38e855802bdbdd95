"""NVIDIA Dynamo without etcd and NATS: processes find each other through files and use TCP and ZeroMQ."""

from __future__ import annotations

from collections.abc import Mapping

from primeslurm.plan.commands.command import Command, EngineRole, long_options
from primeslurm.recipe.sections.routers import DynamoRouter
from primeslurm.wire.names import SERVER_OPTIONS_FOLLOW

WORKER = "primeslurm.inference.dynamo_worker"
_MODES: dict[EngineRole, str] = {"engine": "agg", "prefill": "prefill", "decode": "decode"}
# Options that only vLLM's HTTP server has, and options that the server has, too
_SERVER_OPTIONS = ("host", "port", "middleware", "tool_call_parser", "enable_auto_tool_choice")
_COMMON_OPTIONS = ("model", "served_model_name")
# Options for which a worker's server has no use: rollouts reach the engine through Dynamo.
_UNUSED_OPTIONS = ("enable_scale_out", "disable_uvicorn_access_log")


def frontend(router: DynamoRouter, replica: int) -> Command:
    options: dict[str, object] = {"http_host": "${host}", "http_port": "${port:http}", "router_mode": router.mode}
    if router.session_ttl_s is not None:
        options["router_session_affinity_ttl_secs"] = router.session_ttl_s
    argv = ("${python}", "-m", "dynamo.frontend", *long_options(_PLANES | options | router.extra))
    # This enables the route with token ids as input and output.
    env = discovery_env(replica) | {"DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1"}
    return Command(argv, env, ("http",))


def worker_arguments(options: Mapping[str, object], role: EngineRole) -> tuple[str, ...]:
    """Return the arguments of a Dynamo worker for these options of a vLLM server."""
    worker = {name: value for name, value in options.items() if name not in (*_SERVER_OPTIONS, *_UNUSED_OPTIONS)}
    worker |= _PLANES | {"disaggregation_mode": _MODES[role]}
    server = {name: options[name] for name in (*_COMMON_OPTIONS, *_SERVER_OPTIONS) if name in options}
    return (*long_options(worker), SERVER_OPTIONS_FOLLOW, *long_options(server))


def discovery_env(replica: int) -> dict[str, str]:
    """Return the environment through which the frontend and the workers of a replica find each other."""
    # Replicas share the directory, so each needs its own namespace.
    # Without an address, Dynamo takes that of the default route.
    addresses = dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), "${host}")
    return {"DYN_FILE_KV": "${attempt_dir}/dynamo", "DYN_NAMESPACE": f"replica-{replica}", **addresses}


_PLANES: dict[str, object] = {"discovery_backend": "file", "request_plane": "tcp", "event_plane": "zmq"}
