"""Command lines of engines and routers: recipe in, argv and environment out. Pure.

Host names and ports stay placeholders (see `plan.model`). An engine is one data-parallel rank on `tp` GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from primeslurm.recipe import Recipe
from primeslurm.recipe.inference import EngineSettings

EngineRole = Literal["engine", "prefill", "decode"]
Device = Literal["cuda", "cpu"]

SERVED_MODEL = "policy"
"""The model name that clients ask engines and routers for."""
CPU_KV_CACHE_BYTES = 256 * 2**20
GPU_MEMORY_UTILIZATION = 0.9
MODULE = "vllm.entrypoints.openai.api_server"
GATE = "primeslurm.inference.gate.VersionGate"
TRANSFER_BACKENDS = {"filesystem": "primeslurm_filesystem", "nccl": "nccl"}
"""Weight transport of the recipe to vLLM's name of the backend (registered by inference.plugin)."""
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Command(NamedTuple):
    """How to start a process, and the names of the ports it needs."""

    argv: tuple[str, ...]
    env: dict[str, str]
    ports: tuple[str, ...]


class DataParallel(NamedTuple):
    """An engine's place in its expert-parallel group."""

    size: int = 1
    rank: int = 0
    head: str = ""
    """Process name of rank 0, where the others meet."""


ALONE = DataParallel()


def settings_of(recipe: Recipe, role: EngineRole) -> EngineSettings:
    """What holds for engines of a role: its own settings over those of all engines, over the defaults of its role."""
    common = recipe.inference
    own = {"engine": EngineSettings(), "prefill": common.prefill, "decode": common.decode}[role]
    found = {name: _first(getattr(own, name), getattr(common, name)) for name in EngineSettings.model_fields}
    found |= {name: {**getattr(common, name), **getattr(own, name)} for name in ("env", "vllm_extra")}
    if common.expert_parallel and found["all2all"] is None:
        found["all2all"] = _ALL2ALL[role]
    if role == "decode" and found["cuda_graphs"] is None:
        found["cuda_graphs"] = "FULL_DECODE_ONLY"
    return EngineSettings.model_validate(found)


_ALL2ALL: dict[EngineRole, str] = {
    "engine": "allgather_reducescatter",
    "prefill": "deepep_high_throughput",
    "decode": "deepep_low_latency",
}


def _first(own: object, common: object) -> object:
    return common if own is None else own


def engine_command(recipe: Recipe, device: Device, role: EngineRole, python: str, dp: DataParallel = ALONE) -> Command:
    """One vLLM engine. `engine` prefills and decodes; `prefill` and `decode` hand KV over through NIXL."""
    settings = settings_of(recipe, role)
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
        "disable_uvicorn_access_log": True,
    }
    if recipe.task == "rl":
        options["weight_transfer_config"] = {"backend": TRANSFER_BACKENDS[recipe.weights.transport]}
        options["middleware"] = GATE
    options |= _memory_options(recipe, settings, device)
    options |= _model_options(recipe, settings)
    options |= _parallel_options(recipe, settings, dp)
    if role != "engine":
        options["kv_transfer_config"] = _nixl(role, device)
    options |= settings.vllm_extra
    ports = ["http"]
    if role != "engine":
        ports.append("nixl")
    if dp.size > 1 and dp.rank == 0:
        ports.append("dp_rpc")
    env = _engine_env(recipe, settings, device, role, dp)
    return Command((python, "-m", MODULE, *_long_options(options)), env, tuple(ports))


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
    # RUST_LOG: below warn, it writes three lines a request. Without prefill and decode it hands on its client's token;
    # with them it adds its own, from this variable, to everything that it relays.
    token = {} if engines else {"OPENAI_API_KEY": "${generate_token}"}
    return Command(tuple(argv), {"RUST_LOG": "warn", **token}, ("http", "metrics"))


_ROUTER_OPTIONS: dict[str, object] = {
    "prometheus_host": "${host}",
    "prometheus_port": "${port:metrics}",
    # It listens only once an engine is open, and would give up waiting for one after ten minutes.
    "worker_startup_timeout_secs": 7 * 86400,
    "worker_startup_check_interval": 1,
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


def _memory_options(recipe: Recipe, settings: EngineSettings, device: Device) -> dict[str, object]:
    if device == "cpu":
        return {
            "kv_cache_memory_bytes": settings.kv_cache_bytes or CPU_KV_CACHE_BYTES,
            "enforce_eager": True,
            "distributed_executor_backend": "uni" if recipe.inference.parallel.tp == 1 else "mp",
        }
    options: dict[str, object] = {"gpu_memory_utilization": settings.gpu_memory_utilization or GPU_MEMORY_UTILIZATION}
    if settings.kv_cache_bytes:
        options["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if recipe.inference.enforce_eager:
        options["enforce_eager"] = True
    elif settings.cuda_graphs:
        options["compilation_config"] = {"cudagraph_mode": settings.cuda_graphs}
    return options


def _model_options(recipe: Recipe, settings: EngineSettings) -> dict[str, object]:
    inference = recipe.inference
    options: dict[str, object] = {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "quantization": inference.quantization,
        "kv_cache_dtype": None if inference.kv_cache_dtype == "auto" else inference.kv_cache_dtype,
        "enable_return_routed_experts": recipe.trainer.router_replay or None,
        "tool_call_parser": inference.tool_call_parser,
        "enable_auto_tool_choice": inference.tool_call_parser is not None or None,
        "reasoning_parser": inference.reasoning_parser,
    }
    return {name: value for name, value in options.items() if value is not None}


def _parallel_options(recipe: Recipe, settings: EngineSettings, dp: DataParallel) -> dict[str, object]:
    """Every rank of a group is an engine with an HTTP server of its own; the router balances between them."""
    options: dict[str, object] = {}
    if recipe.inference.expert_parallel:
        options |= {"enable_expert_parallel": True, "all2all_backend": settings.all2all}
    if settings.dbo is not None:
        options["enable_dbo"] = settings.dbo
    if settings.eplb is not None:
        options["enable_eplb"] = settings.eplb
    if dp.size > 1:
        options |= {
            "data_parallel_size": dp.size,
            "data_parallel_rank": dp.rank,
            "data_parallel_address": f"${{host:{dp.head}}}",
            "data_parallel_rpc_port": f"${{port:{dp.head}:dp_rpc}}",
        }
    return options


def _nixl(role: EngineRole, device: Device) -> dict[str, str]:
    return {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[role], "kv_buffer_device": device}


def _engine_env(
    recipe: Recipe, settings: EngineSettings, device: Device, role: EngineRole, dp: DataParallel
) -> dict[str, str]:
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
        if recipe.inference.parallel.tp == 1 and dp.size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or vLLM moves the worker to a process of its own
    if recipe.inference.deep_gemm:
        env |= {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}
    if settings.dbo:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the other runner has no dual batch overlap
    if role != "engine":
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "${host}", "VLLM_NIXL_SIDE_CHANNEL_PORT": _nixl_port(dp)}
        if device == "cpu":
            env["UCX_TLS"] = "tcp,self,sm"
    return {**env, **settings.env}


def _nixl_port(dp: DataParallel) -> str:
    """vLLM adds the data-parallel rank to the side channel's port; the port reserved here is the one it shall use."""
    return f"${{port:nixl-{dp.rank}}}" if dp.rank else "${port:nixl}"


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
