"""Checks `vllm_extra` against the options of the pinned vLLM, and against what the plan sets itself.

`engine_options.json` holds each option as JSON Schema. scripts/engine_options.py writes it from vLLM's own parser.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from primeslurm.base.errors import Violation
from primeslurm.recipe.fields.strings import shown
from primeslurm.recipe.fields.suggestions import nearest, suggestion
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sections.teacher import TeacherEngines

Schema = Mapping[str, Any]

_NETWORK = "other processes reach the engine over plain HTTP at the address that the plan chooses"
_LAYOUT = "the plan starts one process for each data-parallel rank, on `tp` GPUs of one node"
_SERVER = "engines of a plan start as vLLM's HTTP server, which does not read it or would not serve the API"
_WEIGHTS = "the plan connects engines, trainer and KV stores"
PLANNED: dict[str, str] = {
    **dict.fromkeys(("host", "port", "uds", "root_path", "served_model_name"), _NETWORK),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"), _NETWORK),
    **dict.fromkeys(("pipeline_parallel_size", "decode_context_parallel_size"), _LAYOUT),
    **dict.fromkeys(("prefill_context_parallel_size", "distributed_executor_backend", "enable_elastic_ep"), _LAYOUT),
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), _LAYOUT),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_address", "data_parallel_rpc_port"), _LAYOUT),
    **dict.fromkeys(("data_parallel_size_local", "data_parallel_start_rank", "data_parallel_backend"), _LAYOUT),
    **dict.fromkeys(("data_parallel_external_lb", "data_parallel_hybrid_lb"), _LAYOUT),
    **dict.fromkeys(("data_parallel_multi_port_external_lb", "data_parallel_supervisor_port"), _LAYOUT),
    **dict.fromkeys(("headless", "api_server_count", "config", "grpc", "grpc_port"), _SERVER),
    **dict.fromkeys(("weight_transfer_config", "kv_transfer_config"), _WEIGHTS),
    "middleware": "the plan's middleware reports the policy version and whether the engine is alive",
    "enable_scale_out": "rollouts use the routes that it turns on",
    "enable_prefix_caching": "the prefix cache is always on: turns of a rollout, KV offload and router replay need it",
    "logprobs_mode": "the trainer needs log-probabilities of the distribution that tokens are drawn from",
}
"""Options that no recipe may set, and why."""

RECIPE_FIELDS = {
    "model": "model.path or inference.model",
    "dtype": "model.dtype",
    "max_model_len": "model.max_len",
    "seed": "seed",
    "tensor_parallel_size": "inference.parallel.tp",
    "data_parallel_size": "inference.parallel.dp",
    "enable_expert_parallel": "inference.expert_parallel",
    "quantization": "inference.quantization",
    "quantization_config": "inference.quantization",
    "kv_cache_dtype": "inference.kv_cache_dtype",
    "kv_offloading_size": "inference.kv_offload",
    "kv_offloading_backend": "inference.kv_offload",
    "enforce_eager": "inference.enforce_eager",
    "enable_return_routed_experts": "trainer.router_replay",
    "tool_call_parser": "inference.tool_call_parser",
    "enable_auto_tool_choice": "inference.tool_call_parser",
    "reasoning_parser": "inference.reasoning_parser",
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), "inference.speculative"),
}
# Fields of `inference`, `inference.prefill` and `inference.decode`
ROLE_FIELDS = {
    "all2all_backend": "all2all",
    "enable_dbo": "dbo",
    "enable_eplb": "eplb",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "compilation_config.cudagraph_mode": "cuda_graphs",
}
TEACHER_FIELDS = {
    "model": "teacher.path",
    "dtype": "teacher.dtype",
    "max_model_len": "seq_len",
    "seed": "seed",
    "tensor_parallel_size": "teacher.tp",
    "data_parallel_size": "teacher.nodes",
    "quantization": "teacher.quantization",
    "quantization_config": "teacher.quantization",
    "gpu_memory_utilization": "teacher.gpu_memory_utilization",
    "kv_cache_memory_bytes": "teacher.kv_cache_bytes",
    "max_num_batched_tokens": "teacher.max_num_batched_tokens",
}
_SAMPLING = "engines would sample from, or report, another distribution than the trained one"
_CHECKPOINT = "the trainer reads the checkpoint's own configuration"
IN_RL: dict[str, str] = {
    **dict.fromkeys(("logits_processors", "return_sampling_mask", "watermark_config", "diffusion_config"), _SAMPLING),
    **dict.fromkeys(("hf_overrides", "hf_config_path"), _CHECKPOINT),
}
"""Options of engines that must not be set with `task: rl`, and why."""
_TENANTS = "tenants.max_tenants and tenants.max_rank set it"
IN_TENANTS = dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "lora_modules"), _TENANTS)
"""Options of engines that must not be set with `task: tenants`, and why."""
_EVENTS = "with inference.router.policy: kv_aware, the router must know it"
WITH_KV_EVENTS = dict.fromkeys(("block_size", "kv_events_config"), _EVENTS)
"""Options of engines whose KV events a router reads, and why no recipe may set them."""

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "string": ((str,), "text"),
    "boolean": ((bool,), "true or false"),
    "array": ((list, tuple), "a list"),
    "object": ((Mapping,), "a mapping"),
    "null": ((type(None),), "null"),
}
_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (operator.ge, "at least"),
    "exclusiveMinimum": (operator.gt, "greater than"),
    "maximum": (operator.le, "at most"),
    "exclusiveMaximum": (operator.lt, "less than"),
}


class _Extra(NamedTuple):
    """One `vllm_extra` of a recipe."""

    section: str
    options: Mapping[str, object]
    fields: Mapping[str, str]
    """Recipe fields that set an option, by option."""
    refused: Mapping[str, str]


@cache
def _data() -> Schema:
    data: Schema = json.loads(resources.files(__package__).joinpath("engine_options.json").read_text("utf-8"))
    return data


def version() -> str:
    return str(_data()["vllm"])


def options() -> Mapping[str, Schema]:
    """Return the options of the pinned vLLM by their long names with underscores."""
    known: Mapping[str, Schema] = _data()["options"]
    return known


def argument(name: str, value: object) -> object:
    """Return the value in the form that vLLM's command line takes it: some lists and all mappings are JSON texts."""
    if not isinstance(value, list | tuple):
        return value
    if not options().get(name, {}).get("words"):
        return json.dumps(value)
    return [json.dumps(item) if isinstance(item, Mapping) else item for item in value]


def violations(recipe: Recipe) -> list[Violation]:
    """Return everything in `vllm_extra` that vLLM would refuse or ignore, or that contradicts the plan."""
    refused, extras = PLANNED | {"rl": IN_RL, "tenants": IN_TENANTS}.get(recipe.task, {}), list[_Extra]()
    inference = recipe.inference
    if inference.reads_kv_events:
        refused |= WITH_KV_EVENTS
    roles = {"inference": inference, "inference.prefill": inference.prefill, "inference.decode": inference.decode}
    for section, settings in roles.items():
        fields = RECIPE_FIELDS | {option: f"{section}.{name}" for option, name in ROLE_FIELDS.items()}
        extras.append(_Extra(section, settings.vllm_extra, fields, refused))
    if isinstance(recipe.teacher, TeacherEngines):
        extras.append(_Extra("teacher", recipe.teacher.vllm_extra, TEACHER_FIELDS, PLANNED))
    return [
        problem
        for extra in extras
        for name, value in extra.options.items()
        for problem in _problems(extra, name, value)
    ]


def _problems(extra: _Extra, written: str, value: Any) -> list[Violation]:
    path, name = f"{extra.section}.vllm_extra.{written}", written.replace("-", "_")
    if name not in options():
        return [Violation(path, shown(value), f"vLLM {version()} has no such option", _meant(name))]
    if (owner := _owner(extra, name, path, value)) is not None:
        return [owner]
    schema = options()[name]
    if schema.get("words") and isinstance(value, str | int | float):
        value = [value]
    problems = _faults(schema["schema"], value, path)
    if isinstance(value, Mapping):
        nested = (_owner(extra, f"{name}.{key}", f"{path}.{key}", item) for key, item in value.items())
        problems += [owner for owner in nested if owner is not None]
    return problems


def _owner(extra: _Extra, name: str, path: str, value: object) -> Violation | None:
    """Return why the recipe must not set the option; None if it may."""
    if name in extra.fields:
        return Violation(path, shown(value), "a field of the recipe sets this option", f"use {extra.fields[name]}")
    if name in extra.refused:
        return Violation(path, shown(value), extra.refused[name], "leave it out")
    return None


def _meant(name: str) -> str:
    """Suggest the option that was meant: an alias, a negation, an abbreviation, or a similar name."""
    known = options()
    if name.startswith("no_") and name[3:] in known:
        return f"write {name[3:]}: false"
    aliases = [each for each, option in known.items() if name in option.get("aliases", ())]
    longer = [each for each in known if each.startswith(name)]
    near = next(iter((*aliases, *longer)), "") or nearest(name, list(known))
    return f"did you mean {near}?" if near else "`vllm serve --help=all` lists the options"


def _resolved(schema: Schema) -> Schema:
    return _data()["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _has_type(schema: Schema, value: object) -> bool:
    if "enum" in schema:
        return any(type(each) is type(value) for each in schema["enum"])
    kind = schema["type"]
    return isinstance(value, _TYPES[kind][0]) and (kind == "boolean" or not isinstance(value, bool))


def _faults(schema: Schema, value: Any, path: str) -> list[Violation]:
    """Return how a value differs from a schema of engine_options.json."""
    alternatives = [_resolved(each) for each in _resolved(schema).get("anyOf", (schema,))]
    if {} in alternatives:  # only vLLM can judge the value
        return []
    faults = [_faults_of_type(each, value, path) for each in alternatives if _has_type(each, value)]
    if faults:
        return min(faults, key=len)
    choices = [each for each in alternatives if "enum" in each]
    if choices:
        return _not_a_choice(choices[0], value, path)
    types = dict.fromkeys(_TYPES[each["type"]][1] for each in alternatives)
    return [Violation(path, shown(value), f"must be {' or '.join(types)}")]


def _faults_of_type(schema: Schema, value: Any, path: str) -> list[Violation]:
    if "enum" in schema:
        return _not_a_choice(schema, value, path)
    if schema["type"] == "array":
        items = schema.get("items", {})
        return [problem for i, item in enumerate(value) for problem in _faults(items, item, f"{path}.{i}")]
    if schema["type"] == "object":
        return _faults_of_keys(schema, value, path)
    return _out_of_bounds(schema, value, path)


def _not_a_choice(schema: Schema, value: Any, path: str) -> list[Violation]:
    choices = schema["enum"]
    same = [each for each in choices if type(each) is type(value) and each == value]
    folded = [each for each in choices if isinstance(value, str) and str(each).lower() == value.lower()]
    if same or (folded and schema.get("ignoreCase")):
        return []
    fix = suggestion(str(value), [str(each) for each in choices if each is not None])
    if choices == [True]:
        fix = "set it to true, or leave it out"
    return [Violation(path, shown(value), "is not a valid choice", fix)]


def _faults_of_keys(schema: Schema, value: Mapping[str, Any], path: str) -> list[Violation]:
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    missing = [key for key in schema.get("required", ()) if key not in value]
    problems = [Violation(f"{path}.{key}", "", "is required") for key in missing]
    for key, item in value.items():
        if key in properties or isinstance(rest, Mapping):
            problems += _faults(properties.get(key, rest), item, f"{path}.{key}")
        elif not rest:
            fix = suggestion(key, list(properties))
            problems.append(Violation(f"{path}.{key}", shown(item), f"vLLM {version()} has no such key", fix))
    return problems


def _out_of_bounds(schema: Schema, value: Any, path: str) -> list[Violation]:
    return [
        Violation(path, shown(value), f"must be {words} {schema[key]:g}")
        for key, (holds, words) in _BOUNDS.items()
        if key in schema and not holds(value, schema[key])
    ]
