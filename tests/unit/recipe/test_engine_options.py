"""Options in `vllm_extra` that vLLM does not know, that have a wrong value, or that the plan or another field sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import read_recipe
from primeslurm.recipe.rules import engine_options

ROOT = Path(__file__).resolve().parents[3]


def made(**changes: Any) -> Recipe:
    fields: dict[str, Any] = {"name": "x", "max_steps": 1, "seq_len": 64, "model": {"path": "m"}}
    return Recipe.model_validate({**fields, "environments": [{"id": "e"}], **changes})


def found(options: dict[str, Any], **changes: Any) -> list[str]:
    violations = engine_options.violations(made(inference={"vllm_extra": options}, **changes))
    return [str(each).removeprefix("inference.vllm_extra.") for each in violations]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Unknown names
        ({"max_num_seq": 5}, "did you mean max_num_seqs?"),
        ({"no_async_scheduling": True}, "write async_scheduling: false"),
        ({"tp": 2}, "did you mean tensor_parallel_size?"),
        ({"served_model": "x"}, "did you mean served_model_name?"),
        ({"qqqq": 2}, "no such option (`vllm serve --help=all` lists the options)"),
        # Options that a field of the recipe sets
        ({"enforce_eager": "banana"}, "use inference.enforce_eager"),
        ({"max_model_len": 10}, "use model.max_len"),
        ({"max-model-len": 1000}, "use model.max_len"),
        ({"kv_cache_dtype": "banana"}, "use inference.kv_cache_dtype"),
        ({"gpu_memory_utilization": 7}, "use inference.gpu_memory_utilization"),
        ({"dtype": "float16"}, "use model.dtype"),
        ({"quantization": "banana"}, "use inference.quantization"),
        ({"all2all_backend": "banana"}, "use inference.all2all"),
        ({"enable_eplb": True}, "use inference.eplb"),
        ({"seed": 1}, "use seed"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "use inference.speculative"),
        ({"spec_method": "ngram"}, "use inference.speculative"),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "use inference.cuda_graphs"),
        # Options that the plan needs as they are
        ({"headless": True}, "start as vLLM's HTTP server"),
        ({"pipeline_parallel_size": 2}, "one process for each data-parallel rank"),
        ({"enable_prefix_caching": False}, "the prefix cache is always on"),
        ({"logprobs_mode": "raw_logits"}, "log-probabilities of the distribution"),
        ({"enable_scale_out": False}, "rollouts use the routes"),
        ({"port": 1}, "at the address that the plan chooses"),
        ({"config": "x.yaml"}, "start as vLLM's HTTP server"),
        ({"kv_transfer_config": {}}, "the plan connects engines"),
        # Options that change what RL samples
        ({"logits_processors": ["a:B"]}, "another distribution than the trained one"),
        ({"hf-overrides": {"a": 1}}, "the checkpoint's own configuration"),
        # Wrong values
        ({"block_size": -3}, "block_size = -3: must be greater than 0"),
        ({"block_size": "64"}, "block_size = '64': must be a whole number"),
        ({"block_size": None}, "block_size = null: must be a whole number"),
        ({"block_size": True}, "block_size = true: must be a whole number"),
        ({"kv_cache_metrics_sample": 7}, "must be at most 1"),
        ({"async_scheduling": "banana"}, "must be true or false"),
        ({"scheduling_policy": "prio"}, "did you mean priority?"),
        ({"disable_log_stats": False}, "set it to true, or leave it out"),
        ({"numa_bind_nodes": [0, "a"]}, "numa_bind_nodes.1 = 'a': must be a whole number"),
        ({"attention_backend": "FLASH_ATN"}, "did you mean FLASH_ATTN?"),
        ({"compilation_config": "{}"}, "must be a mapping"),
        ({"compilation_config": {"custom_op": ["all"]}}, "no such key (did you mean custom_ops?)"),
        ({"compilation_config": {"mode": "NONEX"}}, "compilation_config.mode = 'NONEX': is not a valid choice"),
        ({"compilation_config": {"pass_config": {"eliminate_noops": 3}}}, "pass_config.eliminate_noops = 3"),
        ({"lora_modules": [{"name": "a"}]}, "lora_modules.0.path: is required"),
    ],
)
def test_wrong_option_is_one_violation(options: dict[str, Any], expected: str) -> None:
    (violation,) = found(options)
    assert expected in violation


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 64, "async_scheduling": False, "max_logprobs": -1},
        {"enable-chunked-prefill": False},
        {"attention_backend": "flash_attn", "optimization_level": 2},
        {"numa_bind_nodes": 0, "allowed_origins": ["*"]},
        {"load_format": "dummy", "limit_mm_per_prompt": {"image": 3}, "cpu_offload_gb": 4},
        {"compilation_config": {"mode": 0, "max_cudagraph_capture_size": None}},
        {"model_loader_extra_config": {"anything": [1]}, "additional_config": {"x": 1}},
    ],
)
def test_right_options_are_accepted(options: dict[str, Any]) -> None:
    assert found(options) == []


def test_all_mistakes_are_reported_in_one_pass() -> None:
    config = {"levle": 3, "mode": "x", "cudagraph_mode": "FULL"}
    assert len(found({"max_num_seq": 1, "port": 1, "block_size": 0, "compilation_config": config})) == 6


def test_each_section_names_its_own_field() -> None:
    extra = {"vllm_extra": {"max_num_seqs": 1, "quantization": "fp8"}}
    teacher = {"type": "engines", "path": "t", **extra}
    violations = engine_options.violations(made(inference={"decode": extra}, teacher=teacher))
    assert [(each.field, each.fix) for each in violations] == [
        ("inference.decode.vllm_extra.max_num_seqs", "use inference.decode.max_num_seqs"),
        ("inference.decode.vllm_extra.quantization", "use inference.quantization"),
        ("teacher.vllm_extra.quantization", "use teacher.quantization"),  # a teacher has no field for max_num_seqs
    ]


def test_served_models_may_sample_as_they_like() -> None:
    options = {"logits_processors": ["a:B"], "hf_overrides": {"a": 1}}
    assert len(found(options)) == 2
    assert found(options, task="serve", environments=[]) == []


def test_named_options_and_fields_exist() -> None:
    fields = engine_options.RECIPE_FIELDS | engine_options.TEACHER_FIELDS
    names = {*engine_options.PLANNED, *engine_options.IN_RL, *fields, *engine_options.ROLE_FIELDS}
    assert {name for name in names if "." not in name} <= set(engine_options.options())
    recipe = made(teacher={"type": "engines", "path": "t"})
    for path in (*fields.values(), *(f"inference.decode.{name}" for name in engine_options.ROLE_FIELDS.values())):
        value: Any = recipe
        for name in path.split("."):
            value = getattr(value, name)


def test_stored_options_are_those_of_the_pinned_vllm() -> None:
    pins = (ROOT / "pyproject.toml").read_text("utf-8")
    assert set(re.findall(r'"vllm(?:-cpu)?==([\d.]+)"', pins)) == {engine_options.version()}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_recipes_have_no_wrong_option(path: Path) -> None:
    assert engine_options.violations(read_recipe(path, []).valid_value()) == []
