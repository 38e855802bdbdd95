"""Command lines of engines and routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from primeslurm.plan.commands.command import Command, EngineRole, ReplicaEngines
from primeslurm.plan.commands.engine import DataParallel
from primeslurm.plan.commands.engine_defaults import OPTIONS
from primeslurm.plan.commands.routers import router_command
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import read_recipe
from primeslurm.recipe.rules import engine_options
from primeslurm.recipe.sections.monitor import Logging
from primeslurm.recipe.sections.routers import VllmRouter
from tests.support.engine_commands import engine_command

ROOT = Path(__file__).resolve().parents[3]


def recipe(**inference: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "max_steps": 1,
            "seq_len": 2048,
            "model": {"path": "/models/tiny", "dtype": "float32"},
            "environments": [{"id": "reverse-text"}],
            "inference": inference,
        }
    )


def option(command: Command, name: str) -> str:
    """The value after an option that must occur exactly once."""
    assert command.argv.count(name) == 1
    return command.argv[command.argv.index(name) + 1]


def test_aggregated_engine_on_cpu() -> None:
    command = engine_command(recipe(), "cpu", "engine", "/venv/bin/python")
    assert command.argv == (
        *("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "${host}", "--port", "${port:http}"),
        *("--model", "/models/tiny", "--served-model-name", "policy", "--dtype", "float32"),
        *("--max-model-len", "2048", "--seed", "0", "--tensor-parallel-size", "1"),
        *("--enable-prefix-caching", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        "--disable-uvicorn-access-log",
        *("--weight-transfer-config", '{"backend": "primeslurm_filesystem"}'),
        *("--middleware", "primeslurm.inference.version_gate.VersionGate"),
        *("--kv-cache-memory-bytes", "268435456", "--enforce-eager", "--distributed-executor-backend", "uni"),
    )
    assert command.env == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "${host}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    assert command.ports == ("http",)


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_disaggregated_engines_transfer_kv(role: Any, kv_role: str, device: Any) -> None:
    command = engine_command(recipe(), device, role, "python")
    assert json.loads(option(command, "--kv-transfer-config")) == {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_buffer_device": device,
        "kv_connector_extra_config": {"kv_lease_duration": 2 * recipe().weights.load_s},
    }
    assert command.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "${host}"
    assert command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "${port:nixl}"
    assert command.env["UCX_TLS"] == ("tcp,self,sm" if device == "cpu" else "all")
    assert command.env["UCX_NET_DEVICES"] == "${ucx_devices_near}"
    assert command.ports == ("http", "nixl")


def test_cuda_engine_leaves_memory_and_kernels_to_vllm() -> None:
    command = engine_command(recipe(parallel={"tp": 8}), "cuda", "engine", "python")
    assert option(command, "--tensor-parallel-size") == "8"
    assert option(command, "--gpu-memory-utilization") == "0.9"
    for absent in ("--enforce-eager", "--kv-cache-memory-bytes", "--distributed-executor-backend"):
        assert absent not in command.argv
    assert not {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"} & command.env.keys()


@pytest.mark.parametrize(("eplb", "filtered"), [(None, True), (True, False)])
def test_expert_parallel_engine_reads_only_its_experts(eplb: bool | None, filtered: bool) -> None:
    """With EPLB an engine may get any expert later, so it reads all of them."""
    argv = engine_command(recipe(expert_parallel=True, eplb=eplb), "cuda", "engine", "python").argv
    assert ("--enable-ep-weight-filter" in argv) == filtered
    assert ("lazy" in argv) == filtered
    assert "--enable-ep-weight-filter" not in engine_command(recipe(), "cuda", "engine", "python").argv


@pytest.mark.parametrize(("method", "drafting"), [("ngram", ["engine", "decode"]), ("mtp", list(get_args(EngineRole)))])
def test_engines_draft_tokens(method: str, drafting: list[EngineRole]) -> None:
    """NIXL refuses a pair of engines if only one has draft layers."""
    drafts = recipe(speculative={"method": method, "num_tokens": 3})
    commands = {role: engine_command(drafts, "cuda", role, "python") for role in get_args(EngineRole)}
    values = {role: option(commands[role], "--speculative-config") for role in drafting}
    assert {json.loads(value)["num_speculative_tokens"] for value in values.values()} == {3}
    assert [role for role, command in commands.items() if "--speculative-config" in command.argv] == drafting


def test_low_latency_decode_engine_can_compute_a_preempted_request_again() -> None:
    command = engine_command(recipe(expert_parallel=True, decode={"max_num_seqs": 300}), "cuda", "decode", "python")
    assert option(command, "--max-num-batched-tokens") == "556"
    assert command.env["NVSHMEM_QP_DEPTH"] == "2048"  # DeepEP needs 2 x 557
    drafts = {"method": "ngram", "num_tokens": 3}
    drafting = recipe(expert_parallel=True, decode={"max_num_seqs": 96}, speculative=drafts)
    command = engine_command(drafting, "cuda", "decode", "python")
    assert option(command, "--max-num-batched-tokens") == str(96 * 4 + 256)
    default = engine_command(recipe(expert_parallel=True), "cuda", "decode", "python")
    assert (option(default, "--max-num-seqs"), option(default, "--max-num-batched-tokens")) == ("256", "512")
    given = recipe(expert_parallel=True, decode={"max_num_batched_tokens": 128})
    assert option(engine_command(given, "cuda", "decode", "python"), "--max-num-batched-tokens") == "128"
    plain = engine_command(recipe(), "cuda", "decode", "python")
    assert "--max-num-batched-tokens" not in plain.argv and "NVSHMEM_QP_DEPTH" not in plain.env


def test_ranks_of_a_group_wait_for_each_other_until_the_start_timeout() -> None:
    for settings in ({"expert_parallel": True}, {"parallel": {"tp": 2}}):
        command = engine_command(recipe(start_timeout_s=7200, **settings), "cuda", "engine", "python")
        assert option(command, "--distributed-timeout-seconds") == "7200"
        assert option(command, "--cpu-distributed-timeout-seconds") == "7200"
    assert "--distributed-timeout-seconds" not in engine_command(recipe(), "cuda", "engine", "python").argv


def test_recipe_overrides_variables_that_the_plan_chooses() -> None:
    wide = {"expert_parallel": True, "decode": {"env": {"VLLM_DEEP_GEMM_WARMUP": "full"}}}
    command = engine_command(recipe(**wide), "cuda", "decode", "python")
    assert command.env["VLLM_DEEP_GEMM_WARMUP"] == "full" and command.env["VLLM_RANDOMIZE_DP_DUMMY_INPUTS"] == "1"
    on_cpu = engine_command(recipe(**wide), "cpu", "prefill", "python").env
    assert not {"VLLM_DEEP_GEMM_WARMUP", "VLLM_RANDOMIZE_DP_DUMMY_INPUTS", "NVSHMEM_SYMMETRIC_SIZE"} & on_cpu.keys()


def test_kv_lease_outlasts_weight_updates_only_if_there_are_any() -> None:
    served = recipe().model_copy(update={"task": "serve"})
    assert "kv_lease_duration" not in option(
        engine_command(served, "cuda", "prefill", "python"), "--kv-transfer-config"
    )


def test_compiled_code_of_gpu_engines_stays_on_the_node() -> None:
    assert engine_command(recipe(), "cuda", "engine", "python").env["PRIMESLURM_COMPILED_CODE"] == "/tmp"
    assert (
        "PRIMESLURM_COMPILED_CODE" not in engine_command(recipe(), "cpu", "engine", "python").env
    )  # CPUs have no such kernels


def test_cuda_engine_with_fixed_cache_and_eager() -> None:
    command = engine_command(recipe(kv_cache_bytes=1000, enforce_eager=True), "cuda", "engine", "python")
    assert option(command, "--kv-cache-memory-bytes") == "1000" and "--enforce-eager" in command.argv


def test_tensor_parallel_engine_on_cpu_has_worker_processes() -> None:
    command = engine_command(recipe(parallel={"tp": 2}), "cpu", "engine", "python")
    assert option(command, "--distributed-executor-backend") == "mp"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in command.env


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_cannot_replace_an_option_that_the_plan_sets(path: Path) -> None:
    free = {"compilation_config", "disable_uvicorn_access_log", *(default.name for default in OPTIONS)}
    fixed = {*engine_options.PLANNED, *engine_options.RECIPE_FIELDS, *engine_options.ROLE_FIELDS, *free}
    fixed |= {*engine_options.IN_TENANTS}
    it, roles = read_recipe(path, []).valid_value(), get_args(EngineRole)
    dp = DataParallel(size=2, rank=1, head="engine-0")
    argv = [word for role in roles for word in engine_command(it, "cuda", role, "python", dp).argv[3:]]
    names = {word[2:].replace("-", "_") for word in argv if word.startswith("--")}
    assert names and names <= fixed | {f"no_{name}" for name in fixed}


def test_extra_options_are_added() -> None:
    extra = {
        "enable_lora": True,
        "enable-chunked-prefill": False,
        "speculative_config": {"method": "ngram"},
        "lora_target_modules": ["a", "b"],
        "lora_modules": [{"name": "a", "path": "b"}],
        "allowed_origins": ["a", "b"],
    }
    argv = engine_command(recipe(vllm_extra=extra), "cpu", "engine", "python").argv
    assert "--enable-lora" in argv and "--no-enable-chunked-prefill" in argv
    assert argv[argv.index("--speculative-config") + 1] == '{"method": "ngram"}'
    assert argv[argv.index("--lora-target-modules") :][:3] == ("--lora-target-modules", "a", "b")
    assert argv[argv.index("--lora-modules") + 1] == '{"name": "a", "path": "b"}'
    assert argv[argv.index("--allowed-origins") + 1] == '["a", "b"]'  # vLLM takes this list as one JSON text


def test_options_for_agreement_reach_the_engine() -> None:
    it = recipe(batch_invariant=True)
    it = it.model_copy(update={"model": it.model.model_copy(update={"head_dtype": "float32"})})
    command = engine_command(it, "cuda", "engine", "python")
    assert json.loads(option(command, "--hf-overrides")) == {"head_dtype": "float32"}
    assert command.env["VLLM_BATCH_INVARIANT"] == "1"
    plain = engine_command(recipe(), "cuda", "engine", "python")
    assert "--hf-overrides" not in plain.argv and "VLLM_BATCH_INVARIANT" not in plain.env


def test_extra_compilation_config_adds_to_the_plans() -> None:
    it = recipe(cuda_graphs="FULL", vllm_extra={"compilation_config": {"mode": 0}})
    command = engine_command(it, "cuda", "engine", "python")
    assert json.loads(option(command, "--compilation-config")) == {"cudagraph_mode": "FULL", "mode": 0}


def test_engines_with_their_own_checkpoint_quantise_nothing() -> None:
    command = engine_command(recipe(quantization="fp8", model="/models/fp8"), "cuda", "engine", "python")
    assert option(command, "--model") == "/models/fp8" and "--quantization" not in command.argv
    assert "--quantization" in engine_command(recipe(quantization="fp8"), "cuda", "engine", "python").argv


def test_engines_use_the_scales_of_an_fp8_trainer() -> None:
    it = recipe(quantization="fp8")
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in engine_command(it, "cuda", "engine", "python").env
    fp8 = it.model_copy(update={"trainer": it.trainer.model_copy(update={"fp8": True})})
    assert engine_command(fp8, "cuda", "engine", "python").env["VLLM_USE_DEEP_GEMM_E8M0"] == "0"


def test_role_environment_overrides_common_environment() -> None:
    it = recipe(env={"OMP_NUM_THREADS": "4", "A": "all"}, prefill={"env": {"A": "prefill"}})
    assert engine_command(it, "cpu", "engine", "python").env["OMP_NUM_THREADS"] == "4"
    assert engine_command(it, "cpu", "prefill", "python").env["A"] == "prefill"
    assert engine_command(it, "cpu", "decode", "python").env["A"] == "all"


def test_router_over_engines() -> None:
    command = router_command(recipe(), VllmRouter(), ReplicaEngines(engines=["engine-r0-0", "engine-r0-1"]), "router-0")
    assert command.argv[:5] == ("${python}", "-m", "primeslurm.inference.router", "--name", "router-0")
    assert option(command, "--health-port") == "${port:health}" and option(command, "--attempt-dir") == "${attempt_dir}"
    assert option(command, "--policy") == "consistent_hash"
    assert command.argv[-3:] == (
        "--worker-urls",
        "http://${addr:engine-r0-0:http}",
        "http://${addr:engine-r0-1:http}",
    )
    assert command.ports == ("http", "metrics", "health")


def test_router_over_prefill_and_decode() -> None:
    router = VllmRouter(policy="power_of_two", extra={"max_payload_size": 7})
    command = router_command(recipe(), router, ReplicaEngines(prefill=["p0", "p1"], decode=["d0"]), "router-0")
    assert "--vllm-pd-disaggregation" in command.argv and "--worker-urls" not in command.argv
    assert command.argv[-6:] == (
        *("--prefill", "http://${addr:p0:http}", "--prefill", "http://${addr:p1:http}"),
        *("--decode", "http://${addr:d0:http}"),
    )
    assert option(command, "--prefill-policy") == option(command, "--decode-policy") == "power_of_two"
    router = router.model_copy(update={"decode_policy": "sticky_least_loaded"})
    command = router_command(recipe(), router, ReplicaEngines(prefill=["p0", "p1"], decode=["d0"]), "router-0")
    assert option(command, "--prefill-policy") == "power_of_two"
    assert option(command, "--decode-policy") == "sticky_least_loaded"
    assert option(command, "--max-payload-size") == "7"


@pytest.mark.parametrize(
    "workers", [{}, {"prefill": ["p"]}, {"decode": ["d"]}, {"engines": ["e"], "prefill": ["p"], "decode": ["d"]}]
)
def test_replica_has_either_engines_or_prefill_and_decode(workers: dict[str, list[str]]) -> None:
    with pytest.raises(ValueError, match="either engines, or prefill"):
        ReplicaEngines(**workers)


def test_engines_log_at_the_level_and_in_the_format_of_the_run() -> None:
    changed = recipe().model_copy(update={"logging": Logging(level="debug", format="json")})
    command = engine_command(changed, "cpu", "engine", "python")
    assert command.env["VLLM_LOGGING_LEVEL"] == "DEBUG"
    name = command.env["VLLM_LOGGING_CONFIG_PATH"].removeprefix("${tmp}/")
    assert json.loads(command.files[name])["loggers"]["vllm"]["level"] == "DEBUG"
    chosen = recipe(env={"VLLM_LOGGING_LEVEL": "ERROR"}).model_copy(update={"logging": Logging(level="debug")})
    assert engine_command(chosen, "cpu", "engine", "python").env["VLLM_LOGGING_LEVEL"] == "ERROR"
