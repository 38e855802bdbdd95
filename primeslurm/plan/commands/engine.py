"""The command of a vLLM engine. An engine is one data-parallel rank on `tp` GPUs. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from primeslurm.base import logs
from primeslurm.models import ATTENTION, SWIGLU, Parsers, parsers_of
from primeslurm.plan.commands import dynamo, kv, kv_events
from primeslurm.plan.commands.command import COMPILED_CODE, Command, Device, EngineRole, long_options
from primeslurm.plan.commands.engine_defaults import ENVIRONMENT, OPTIONS, EngineFacts, batch_limits, chosen
from primeslurm.plan.commands.routers import router_name
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules import engine_options
from primeslurm.recipe.sections.inference import EngineSettings
from primeslurm.recipe.sections.routers import DynamoRouter
from primeslurm.recipe.sections.speculation import Speculation
from primeslurm.recipe.sections.tenant_deployment import Tenants
from primeslurm.wire.names import ADAPTER_BACKEND, ADAPTERS, SERVED_MODEL

CPU_KV_CACHE_BYTES = 256 * 2**20
GPU_MEMORY_UTILIZATION = 0.9
# The only all2all backend without GPUs. vLLM does not start on CPUs with another one.
CPU_ALL2ALL = "allgather_reducescatter"
# Log-probabilities of the distribution that tokens are drawn from, after the temperature. The trainer divides by it,
# too, so `raw_logprobs` (before it) would not match.
LOGPROBS_MODE = "processed_logprobs"
# Name of the file with the configuration of an engine's log
LOG_CONFIG = "vllm_logging.json"
MODULE = "vllm.entrypoints.openai.api_server"
GATE = "primeslurm.inference.version_gate.VersionGate"
# Middleware without policy versions, for engines that keep the weights they loaded
CORE_GATE = "primeslurm.inference.liveness_gate.LivenessGate"
# vLLM's name of the recipe's quantization. Blocks of 128 x 128, as DeepGEMM and the trainer use.
QUANTIZATION = {"fp8": "fp8_per_block"}
# Weights, by checkpoint name, that vLLM would quantise. Released FP8 checkpoints and the trainer keep them in full
# precision (`wire.weight_transfer.tensor_names.in_fp8`). vLLM itself skips the others that are not quantised there.
UNQUANTISED = ("*.in_proj_a", "*.in_proj_b", "*.gate")
# vLLM's name of the backend for a weight transport of the recipe (registered by inference.plugin)
TRANSFER_BACKENDS = {"filesystem": "primeslurm_filesystem", "nccl": "primeslurm_collective"}
# Directory of the adapters that a deployment's Tinker service exports. Requests name them by their path below it.
EXPORTS = "${run_dir}/tinker/checkpoints"
# Ranks that vLLM accepts as the largest one of an engine
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


class DataParallel(NamedTuple):
    """Rank of an engine in its expert-parallel group."""

    size: int = 1
    rank: int = 0
    head: str = ""  # process name of rank 0, whose address the others need


ALONE = DataParallel()


def settings_of(recipe: Recipe, role: EngineRole) -> EngineSettings:
    """Return the settings of a role's engines: role settings override common settings, which override defaults."""
    common = recipe.inference
    role_settings = {"engine": EngineSettings(), "prefill": common.prefill, "decode": common.decode}[role]
    values = {name: getattr(common, name) for name in EngineSettings.model_fields}
    values |= {name: value for name, value in role_settings if value is not None}
    values |= {name: {**getattr(common, name), **getattr(role_settings, name)} for name in ("env", "vllm_extra")}
    if common.expert_parallel and values["all2all"] is None:
        values["all2all"] = _ALL2ALL[role]
    if role == "decode" and values["cuda_graphs"] is None:
        values["cuda_graphs"] = "FULL_DECODE_ONLY"
    limits = batch_limits(recipe, role, values["all2all"], values["max_num_seqs"])
    if limits and values["max_num_batched_tokens"] is None:
        values["max_num_seqs"], values["max_num_batched_tokens"] = limits
    return EngineSettings.model_validate(values)


_ALL2ALL: dict[EngineRole, str] = {
    "engine": "allgather_reducescatter",
    "prefill": "deepep_high_throughput",
    "decode": "deepep_low_latency",
}


class Engines:
    """Commands of the engines of one role. Common options are worked out once.

    Role `engine` prefills and decodes. `prefill` and `decode` engines transfer KV through NIXL.
    """

    def __init__(self, recipe: Recipe, device: Device, role: EngineRole, python: str) -> None:
        self._recipe, self._device, self._role = recipe, device, role
        self._settings = settings_of(recipe, role)
        self._in_dynamo = isinstance(recipe.inference.router, DynamoRouter)
        self._options = _shared_options(recipe, self._settings, device, role)
        self._run = (python, "-m", dynamo.WORKER if self._in_dynamo else MODULE)
        self._files = kv.engine_files(recipe, device) | _log_files(recipe)
        self._scratch = kv.engine_scratch(recipe, role)

    def command(self, dp: DataParallel = ALONE, replica: int = 0) -> Command:
        """Return the command of one data-parallel rank of a replica."""
        ports = ["http"]
        if self._role != "engine":
            ports.append("nixl")
        if dp.size > 1 and dp.rank == 0:
            ports.append("dp_rpc")
        ports += kv_events.ports(self._recipe, self._role)
        env = _engine_env(self._recipe, self._settings, self._device, self._role, dp)
        env |= kv_events.engine_env(self._recipe, self._role, router_name(replica))
        if self._in_dynamo:
            env |= dynamo.discovery_env(replica)
        options = self._options | _rank_options(dp)
        arguments = dynamo.worker_arguments(options, self._role) if self._in_dynamo else long_options(options)
        return Command((*self._run, *arguments), env, tuple(ports), self._files, self._scratch)


def _shared_options(recipe: Recipe, settings: EngineSettings, device: Device, role: EngineRole) -> dict[str, object]:
    options: dict[str, object] = {
        "host": "${host}",
        "port": "${port:http}",
        "model": recipe.inference.model or recipe.model.path,
        "served_model_name": SERVED_MODEL,
        "dtype": recipe.model.dtype,
        "max_model_len": recipe.max_len,
        "seed": recipe.seed,
        "tensor_parallel_size": recipe.inference.parallel.tp,
        "enable_prefix_caching": True,
        "enable_scale_out": True,  # serves /inference/v1/generate
        "logprobs_mode": LOGPROBS_MODE,
        "disable_uvicorn_access_log": True,
    }
    if recipe.samples:
        transport = "nccl" if recipe.weights.transport == "nccl" else "filesystem"  # auto is resolved in a whole plan
        options["weight_transfer_config"] = {"backend": TRANSFER_BACKENDS[transport]}
    if recipe.sends_adapter:
        options |= _adapter_options(recipe)
    if recipe.tenants is not None:
        options |= _tenant_adapter_options(recipe.tenants)
    options["middleware"] = GATE if recipe.samples else CORE_GATE
    options |= _memory_options(recipe, settings, device)
    options |= _model_options(recipe, settings)
    options |= _parallel_options(recipe, settings, device)
    options |= chosen(OPTIONS, EngineFacts(recipe, settings, device, role))
    if (speculation := recipe.inference.speculative) is not None and speculation.is_used_by(role):
        options["speculative_config"] = _speculative_config(speculation)
    if (transfer := kv.transfer_config(recipe, role, device)) is not None:
        options["kv_transfer_config"] = transfer
    if (events := kv_events.publisher(recipe, role)) is not None:
        options["kv_events_config"] = events
    return options | _extra_options(settings, options)


def _extra_options(settings: EngineSettings, planned: Mapping[str, object]) -> dict[str, object]:
    """Return `vllm_extra` as options. A mapping adds to the plan's, for example to `compilation_config`."""
    extra: dict[str, object] = {}
    for name, value in settings.vllm_extra.items():
        option = name.replace("-", "_")
        of_plan = planned.get(option)
        if isinstance(of_plan, Mapping) and isinstance(value, Mapping):
            extra[option] = {**of_plan, **value}
        else:
            extra[option] = engine_options.argument(option, value)
    return extra


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
    family_parsers = parsers_of(recipe.model.path) if recipe.task == "serve" else Parsers()
    tool_call = inference.tool_call_parser or family_parsers.tool_call
    quantization = inference.quantization if inference.model is None else None  # else vLLM reads it from the checkpoint
    options: dict[str, object] = {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "quantization": QUANTIZATION[quantization] if quantization else None,
        "quantization_config": {"ignore": UNQUANTISED} if quantization else None,
        "kv_cache_dtype": None if inference.kv_cache_dtype == "auto" else inference.kv_cache_dtype,
        "enable_return_routed_experts": recipe.trainer.router_replay or None,
        "tool_call_parser": tool_call,
        "enable_auto_tool_choice": True if tool_call else None,
        "reasoning_parser": inference.reasoning_parser or family_parsers.reasoning,
        "hf_overrides": {"head_dtype": "float32"} if recipe.model.head_dtype == "float32" else None,
    }
    return {name: value for name, value in options.items() if value is not None}


def _adapter_options(recipe: Recipe) -> dict[str, object]:
    lora = recipe.trainer.lora
    assert lora is not None
    return {
        "weight_transfer_config": {"backend": ADAPTER_BACKEND},
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= lora.rank),
        # Otherwise vLLM would also prepare the embedding and the head, which no adapter changes.
        "lora_target_modules": sorted(lora.targets or ATTENTION | SWIGLU),
    }


def _tenant_adapter_options(tenants: Tenants) -> dict[str, object]:
    return {
        "enable_lora": True,
        "max_loras": tenants.engine_adapters,
        "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= tenants.max_rank),
    }


def _speculative_config(speculation: Speculation) -> dict[str, object]:
    values: dict[str, object] = speculation.model_dump(exclude_none=True)
    values["num_speculative_tokens"] = values.pop("num_tokens")
    return values


def _parallel_options(recipe: Recipe, settings: EngineSettings, device: Device) -> dict[str, object]:
    options: dict[str, object] = {}
    if recipe.inference.expert_parallel:
        options |= {
            "enable_expert_parallel": True,
            "all2all_backend": settings.all2all if device == "cuda" else CPU_ALL2ALL,
        }
    if settings.dbo is not None:
        options["enable_dbo"] = settings.dbo
    if settings.eplb is not None:
        options["enable_eplb"] = settings.eplb
    return options


def _rank_options(dp: DataParallel) -> dict[str, object]:
    # Every rank of a group is an engine with its own HTTP server. The router balances between them.
    if dp.size == 1:
        return {}
    return {
        "data_parallel_size": dp.size,
        "data_parallel_rank": dp.rank,
        "data_parallel_address": f"${{host:{dp.head}}}",
        "data_parallel_rpc_port": f"${{port:{dp.head}:dp_rpc}}",
    }


def _log_files(recipe: Recipe) -> dict[str, str]:
    """Return the file with the configuration of vLLM's and uvicorn's loggers."""
    if recipe.logging.format != "json":
        return {}
    return {LOG_CONFIG: json.dumps(logs.server_config(recipe.logging.level))}


def _engine_env(
    recipe: Recipe, settings: EngineSettings, device: Device, role: EngineRole, dp: DataParallel
) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for pause, resume, weight updates and the engine core
        "VLLM_HOST_IP": "${host}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        env |= {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM's default pins every engine of a node to the same core
            "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request with logprobs compiles for seconds
        }
        if recipe.inference.parallel.tp == 1 and dp.size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # otherwise vLLM runs the worker in its own process
    else:
        env |= COMPILED_CODE
    if recipe.inference.deep_gemm:
        env |= {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}
    if recipe.sends_adapter or recipe.tenants is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # otherwise requests cannot name the adapter
    if recipe.tenants is not None:
        env[ADAPTERS] = EXPORTS
    if recipe.inference.batch_invariant:
        env["VLLM_BATCH_INVARIANT"] = "1"
    if recipe.samples and recipe.trainer.fp8:
        # vLLM rounds scales up to powers of two, even on SM90, whose kernels do not need that. The trainer does not
        # round.
        env["VLLM_USE_DEEP_GEMM_E8M0"] = "0"
    if recipe.logging.level != "info":
        env["VLLM_LOGGING_LEVEL"] = recipe.logging.level.upper()
    if recipe.logging.format == "json":
        env["VLLM_LOGGING_CONFIG_PATH"] = f"${{tmp}}/{LOG_CONFIG}"
    if settings.dbo:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the other runner has no dual batch overlap
    defaults = chosen(ENVIRONMENT, EngineFacts(recipe, settings, device, role))
    env |= {name: str(value) for name, value in defaults.items()}
    return {**env, **kv.engine_env(recipe, role, device, dp.rank), **settings.env}
