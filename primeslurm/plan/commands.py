"""Command lines of engines and routers: recipe in, argv and environment out. Pure.

Host names and ports stay placeholders (see `plan.model`). An engine is one data-parallel rank on `tp` GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from primeslurm.recipe import Recipe

EngineRole = Literal["engine", "prefill", "decode"]
Device = Literal["cuda", "cpu"]

SERVED_MODEL = "policy"
"""The model name that clients ask engines and routers for."""
CPU_KV_CACHE_BYTES = 256 * 2**20
MODULE = "vllm.entrypoints.openai.api_server"
GATE = "primeslurm.inference.gate.VersionGate"
TRANSFER_BACKENDS = {"filesystem": "primeslurm_filesystem"}
"""Weight transport of the recipe to vLLM's name of the backend (registered by inference.plugin)."""
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Command(NamedTuple):
    """How to start a process, and the names of the ports it needs."""

    argv: tuple[str, ...]
    env: dict[str, str]
    ports: tuple[str, ...]


def engine_command(recipe: Recipe, device: Device, role: EngineRole, python: str) -> Command:
    """One vLLM engine. `engine` prefills and decodes; `prefill` and `decode` hand KV over through NIXL."""
    options: dict[str, object] = {
        "host": "${host}",
        "port": "${port:http}",
        "model": recipe.model.path,
        "served_model_name": SERVED_MODEL,
        "dtype": recipe.model.dtype,
        "max_model_len": recipe.max_len,
        "seed": recipe.seed,
        "tensor_parallel_size": recipe.inference.parallel.tp,
        "enable_prefix_caching": True,
        "enable_scale_out": True,  # serves /inference/v1/generate
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from: temperature, top-k, top-p
        "weight_transfer_config": {"backend": TRANSFER_BACKENDS[recipe.weights.transport]},
        "middleware": GATE,
        "disable_uvicorn_access_log": True,
    }
    options |= _memory_options(recipe, device)
    if role != "engine":
        options["kv_transfer_config"] = _nixl(role, device)
    options |= recipe.inference.vllm_extra
    ports = ("http",) if role == "engine" else ("http", "nixl")
    return Command((python, "-m", MODULE, *_long_options(options)), _engine_env(recipe, device, role), ports)


def router_command(
    recipe: Recipe, python: str, engines: Sequence[str] = (), prefill: Sequence[str] = (), decode: Sequence[str] = ()
) -> Command:
    """The router in front of one replica: over `engines`, or over `prefill` and `decode` (names of processes).

    Raises:
        ValueError: not exactly one of the two shapes is given.
    """
    if bool(engines) == bool(prefill and decode) or bool(prefill) != bool(decode):
        raise ValueError("a router serves either engines, or prefill and decode engines")
    policy = recipe.inference.router.policy
    options: dict[str, object] = {"host": "${host}", "port": "${port:http}", "policy": policy}
    argv = [python, "-m", "vllm_router.launch_router", *_long_options(options | _ROUTER_OPTIONS)]
    argv += ["--request-timeout-secs", str(recipe.orchestrator.request_timeout_s)]
    if engines:
        argv += ["--worker-urls", *map(_url, engines)]
    else:
        argv += ["--vllm-pd-disaggregation", "--prefill-policy", policy, "--decode-policy", policy]
        argv += [part for name in prefill for part in ("--prefill", _url(name))]
        argv += [part for name in decode for part in ("--decode", _url(name))]
    return Command(tuple(argv), {}, ("http", "metrics"))


_ROUTER_OPTIONS: dict[str, object] = {
    "prometheus_host": "${host}",
    "prometheus_port": "${port:metrics}",
    "log_level": "warning",  # consistent_hash logs three lines per request below this
    # An engine that dies or goes stale must leave the router in about a second, and come back as fast: the router
    # retries nothing between prefill and decode, so until then its clients see errors.
    "health_check_interval_secs": 1,
    "health_check_timeout_secs": 5,
    "health_failure_threshold": 1,
    "health_success_threshold": 1,
    "cb_failure_threshold": 2,
    "cb_success_threshold": 1,
    "cb_timeout_duration_secs": 2,
}


def _memory_options(recipe: Recipe, device: Device) -> dict[str, object]:
    inference = recipe.inference
    if device == "cpu":
        return {
            "kv_cache_memory_bytes": inference.kv_cache_bytes or CPU_KV_CACHE_BYTES,
            "enforce_eager": True,
            "distributed_executor_backend": "uni" if inference.parallel.tp == 1 else "mp",
        }
    options: dict[str, object] = {"gpu_memory_utilization": inference.gpu_memory_utilization}
    if inference.kv_cache_bytes:
        options["kv_cache_memory_bytes"] = inference.kv_cache_bytes
    if inference.enforce_eager:
        options["enforce_eager"] = True
    return options


def _nixl(role: EngineRole, device: Device) -> dict[str, str]:
    return {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[role], "kv_buffer_device": device}


def _engine_env(recipe: Recipe, device: Device, role: EngineRole) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes of pause, resume and weight updates
        "VLLM_HOST_IP": "${host}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        env |= {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM's default pins every engine of a node to the same core
            "TORCHDYNAMO_DISABLE": "1",  # or the first request for logprobs compiles for seconds
        }
        if recipe.inference.parallel.tp == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or vLLM moves the worker to a process of its own
    if role != "engine":
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "${host}", "VLLM_NIXL_SIDE_CHANNEL_PORT": "${port:nixl}"}
        if device == "cpu":
            env["UCX_TLS"] = "tcp,self,sm"
    own = {"engine": {}, "prefill": recipe.inference.prefill_env, "decode": recipe.inference.decode_env}[role]
    return {**env, **recipe.inference.env, **own}


def _long_options(options: Mapping[str, object]) -> list[str]:
    """`{"max_len": 5, "fast": True, "slow": False, "x": {...}}` -> --max-len 5 --fast --no-slow --x JSON."""
    argv: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            argv += [f"--{name}", json.dumps(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            argv += [f"--{name}", *map(str, value)]
        else:
            argv += [f"--{name}", str(value)]
    return argv


def _url(process: str) -> str:
    return f"http://${{addr:{process}:http}}"
