"""Every rule of the compatibility table: a recipe that breaks it, and the nearest one that keeps it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from primeslurm.models.catalog import catalog
from primeslurm.models.shape import DeltaNets, ModelShape
from primeslurm.plan.checks.compatibility import GROUPS, conflicts
from primeslurm.plan.checks.rule import Rule, RuleContext
from primeslurm.plan.placement.resources import resource_requests
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import merge
from tests.support.recipes import recipe_data, site

RULES: dict[str, Rule] = {rule.name: rule for rules in GROUPS.values() for rule in rules}

MOE, DENSE, HYBRID = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"
GLM, OSS = "zai-org/GLM-5.1", "openai/gpt-oss-120b"
GPU = {"nodes": {"default": {"gres": "gpu:h200", "mem": "1900G"}}}
CPU = {"device": "cpu"}
REPLAY: dict[str, Any] = {"trainer": {"router_replay": True}}
PD: dict[str, Any] = {"deployment": {"inference": {"type": "disaggregated"}}}
MOONCAKE: dict[str, Any] = {"inference": {"kv_offload": {"type": "mooncake", "cpu": {"bytes": 2**38}}}}
TEACHER: dict[str, Any] = {
    "teacher": {"type": "engines", "path": "/models/teacher"}, "orchestrator": {"advantages": "opd"}
}  # fmt: skip
HINTED: dict[str, Any] = {"teacher": {"type": "policy", "hint": "answer"}, "orchestrator": {"advantages": "opd"}}
KV_AWARE: dict[str, Any] = {
    "task": "serve", "environments": [], "inference": {"router": {"type": "vllm-router", "policy": "kv_aware"}}
}  # fmt: skip
EP: dict[str, Any] = {"inference": {"expert_parallel": True}}
COLOCATED: dict[str, Any] = {
    "deployment": {"layout": "one_node", "colocated": True}, "inference": {"gpu_memory_utilization": 0.4}
}  # fmt: skip
SFT: dict[str, Any] = {"task": "sft", "environments": [], "sft": {"data": {"type": "jsonl", "path": "x"}}}


def on(*parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Changes of a recipe, merged."""
    result: dict[str, Any] = {}
    for part in (*parts, changes):
        result = merge(result, part)
    return result


def inference(**changes: Any) -> dict[str, Any]:
    return {"inference": changes}


def speculative(method: str, num_tokens: int = 1) -> dict[str, Any]:
    return inference(speculative={"method": method, "num_tokens": num_tokens})


def trainer(**changes: Any) -> dict[str, Any]:
    return {"trainer": changes}


def parallelism(**changes: Any) -> dict[str, Any]:
    return trainer(parallelism=changes)


def decode(**changes: Any) -> dict[str, Any]:
    return on(PD, EP, inference(decode=changes))


DRAFTED = trainer(draft_layer={})
DYNAMO = inference(router={"type": "dynamo"})

# rule: (what breaks it, what keeps it), each (recipe changes, model, site changes)
EXAMPLES: dict[str, tuple[tuple[dict[str, Any], str, dict[str, Any]], tuple[dict[str, Any], str, dict[str, Any]]]] = {
    "replay-llm-d": (
        (on(REPLAY, inference(router={"type": "llm-d"})), MOE, GPU),
        (on(REPLAY, PD, MOONCAKE), MOE, GPU),
    ),
    "replay-dynamo": ((on(REPLAY, DYNAMO), MOE, GPU), (DYNAMO, MOE, GPU)),
    "dynamo-groups": ((on(DYNAMO, EP), MOE, GPU), (DYNAMO, MOE, GPU)),
    "replay-dense": ((REPLAY, DENSE, GPU), (REPLAY, MOE, GPU)),
    "replay-workers": (
        (on(REPLAY, seq_len=32768), MOE, GPU),
        (on(REPLAY, seq_len=32768, environments=[{"id": "reverse-text", "workers": 4}]), MOE, GPU),
    ),
    "mooncake-rdma": ((MOONCAKE, MOE, {"network": {"rdma": False}}), (MOONCAKE, MOE, GPU)),
    "mooncake-tcp": ((on(MOONCAKE, inference(kv_offload={"protocol": "tcp"})), MOE, GPU), (MOONCAKE, MOE, GPU)),
    "mooncake-alone": ((MOONCAKE, MOE, GPU), (on(MOONCAKE, PD), MOE, GPU)),
    "offload-memory": (
        (inference(kv_offload={"type": "native", "cpu": {"bytes": 2**38}}), MOE, GPU),
        (inference(kv_offload={"type": "native", "cpu": {"bytes": 2**37}}), MOE, GPU),
    ),
    "pinned-memory": (
        (on(PD, inference(env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})), MOE, GPU),
        (inference(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}), MOE, GPU),
    ),
    "hybrid-disaggregated": ((PD, HYBRID, GPU), (PD, MOE, GPU)),
    "hybrid-offload": ((MOONCAKE, HYBRID, GPU), (MOONCAKE, MOE, GPU)),
    "kv-aware-mamba": ((KV_AWARE, HYBRID, GPU), (KV_AWARE, GLM, GPU)),
    "kv-aware-mla": ((on(KV_AWARE, PD), GLM, GPU), (KV_AWARE, GLM, GPU)),
    "kv-aware-offload": ((on(KV_AWARE, MOONCAKE), MOE, GPU), (KV_AWARE, MOE, GPU)),
    "kv-aware-images": ((on(KV_AWARE, model={"vlm": {}}), MOE, GPU), (KV_AWARE, MOE, GPU)),
    "kv-aware-readers": (
        (KV_AWARE, MOE, GPU),
        (on(KV_AWARE, slurm={"inference": {"exclusive": True}}), MOE, GPU),
    ),
    "ep-dense": ((EP, DENSE, GPU), (EP, MOE, GPU)),
    "ep-alone": ((on(EP, inference(parallel={"dp": 1})), MOE, GPU), (on(EP, inference(parallel={"dp": 2})), MOE, GPU)),
    "ep-divides": (
        (on(PD, EP, deployment={"inference": {"prefill": {"nodes_per_replica": 3}}}), GLM, GPU),
        (on(PD, EP, deployment={"inference": {"prefill": {"nodes_per_replica": 4}}}), GLM, GPU),
    ),
    "deepep-nodes": (
        (on(PD, EP, deployment={"inference": {"prefill": {"nodes_per_replica": 2, "gpus_per_node": 4}}}), GLM, GPU),
        (on(PD, EP, deployment={"inference": {"prefill": {"nodes_per_replica": 2}}}), GLM, GPU),
    ),
    "all2all-without-ep": ((inference(all2all="nixl_ep"), MOE, GPU), (on(EP, inference(all2all="nixl_ep")), MOE, GPU)),
    "low-latency-tokens": ((decode(max_num_batched_tokens=1024), MOE, GPU), (decode(max_num_seqs=96), MOE, GPU)),
    "low-latency-prefill": (
        (on(PD, EP, inference(prefill={"all2all": "deepep_low_latency"})), MOE, GPU),
        (on(PD, EP), MOE, GPU),
    ),
    "graphs-high-throughput": ((decode(all2all="deepep_high_throughput"), MOE, GPU), (decode(), MOE, GPU)),
    "graphs-eager": (
        (inference(enforce_eager=True, cuda_graphs="FULL"), MOE, GPU),
        (inference(enforce_eager=True), MOE, GPU),
    ),
    "graphs-batch": ((decode(max_num_seqs=1024), MOE, GPU), (decode(max_num_seqs=512), MOE, GPU)),
    "seqs-tokens": (
        (inference(max_num_seqs=256, max_num_batched_tokens=128), MOE, GPU),
        (inference(max_num_seqs=128, max_num_batched_tokens=128), MOE, GPU),
    ),
    "dbo-backend": ((inference(dbo=True), MOE, GPU), (on(PD, EP, inference(prefill={"dbo": True})), MOE, GPU)),
    "dbo-cpu": ((inference(dbo=True), MOE, CPU), ({}, MOE, CPU)),
    "dbo-unfinished": ((on(PD, EP, inference(prefill={"dbo": True})), MOE, GPU), (on(PD, EP), MOE, GPU)),
    "warmup-skipped": (
        (decode(env={"VLLM_DEEP_GEMM_WARMUP": "skip"}), MOE, GPU),
        (decode(env={"VLLM_DEEP_GEMM_WARMUP": "full"}), MOE, GPU),
    ),
    "warmup-skipped-fp8": (
        (inference(quantization="fp8", env={"VLLM_DEEP_GEMM_WARMUP": "skip"}), MOE, GPU),
        (inference(quantization="fp8"), MOE, GPU),
    ),
    "decode-recompute": (
        (on(decode(max_num_seqs=96, max_num_batched_tokens=96), seq_len=2**17), MOE, GPU),
        (on(decode(max_num_seqs=96), seq_len=2**17), MOE, GPU),
    ),
    "eplb-ep": ((inference(eplb=True), MOE, GPU), (on(EP, inference(eplb=True)), MOE, GPU)),
    "eplb-cpu": ((on(EP, inference(eplb=True)), MOE, CPU), (on(EP, inference(eplb=True)), MOE, GPU)),
    "eplb-updates": (
        (on(EP, inference(eplb=True)), MOE, GPU),
        (on(EP, inference(eplb=True), task="serve", environments=[]), MOE, GPU),
    ),
    "engine-fp8-gpu": (
        (inference(quantization="fp8"), MOE, {"nodes": {"default": {"gpu": "a100"}}}),
        (inference(quantization="fp8"), MOE, {"nodes": {"default": {"gpu": "h100"}}}),
    ),
    "quantised-twice": ((inference(quantization="fp8"), "FP8 blocks", GPU), (inference(quantization="fp8"), OSS, GPU)),
    "engine-model": (
        (inference(model="m/fp8"), MOE, GPU),
        (inference(model="m/fp8", quantization="fp8"), MOE, GPU),
    ),
    "deep-gemm-fp8": (
        (inference(deep_gemm=True), MOE, GPU),
        (inference(deep_gemm=True, quantization="fp8"), MOE, GPU),
    ),
    "deep-gemm-gpu": (
        (inference(deep_gemm=True), MOE, {"nodes": {"default": {"gres": "gpu:l40s"}}}),
        (inference(deep_gemm=True), MOE, {"nodes": {"default": {"gres": "gpu:b200"}}}),
    ),
    "batch-invariant-gpu": ((inference(batch_invariant=True), MOE, CPU), (inference(batch_invariant=True), MOE, GPU)),
    "batch-invariant-dsa": ((inference(batch_invariant=True), GLM, GPU), (inference(batch_invariant=True), MOE, GPU)),
    "batch-invariant-nccl": (
        (inference(batch_invariant=True) | {"weights": {"transport": "nccl"}}, MOE, GPU),
        (inference(batch_invariant=True), MOE, GPU),
    ),
    "tp-heads": ((inference(parallel={"tp": 8}), "odd heads", GPU), (inference(parallel={"tp": 8}), MOE, GPU)),
    "speculative-mtp": ((speculative("mtp"), MOE, GPU), (speculative("mtp"), GLM, GPU)),
    "speculative-mtp-multiple": (
        (speculative("mtp", 3), "two draft layers", GPU),
        (speculative("mtp", 4), "two draft layers", GPU),
    ),
    "speculative-dbo": (
        (on(PD, EP, speculative("mtp"), inference(prefill={"dbo": True})), GLM, GPU),
        (on(PD, EP, speculative("ngram"), inference(prefill={"dbo": True})), GLM, GPU),
    ),
    "speculative-async": (
        (on(speculative("ngram"), inference(vllm_extra={"async-scheduling": True})), MOE, GPU),
        (on(speculative("mtp"), inference(vllm_extra={"async-scheduling": True})), GLM, GPU),
    ),
    "speculative-delta-nets": (
        (speculative("ngram"), "odd recurrent heads", CPU),
        (speculative("ngram"), "odd recurrent heads", GPU),
    ),
    "delta-nets-dtype": (
        ({"model": {"path": "m", "dtype": "float32"}}, "odd recurrent heads", CPU),
        ({"model": {"path": "m", "dtype": "float32"}}, "odd recurrent heads", GPU),
    ),
    "tp-latent": ((inference(parallel={"tp": 8}), GLM, GPU), (inference(parallel={"tp": 8}), MOE, GPU)),
    "trainer-compile": (
        (on(trainer(compile=True), model={"dtype": "float32"}), MOE, GPU),
        (on(trainer(compile=True), model={"dtype": "bfloat16"}), MOE, GPU),
    ),
    "deepep-without-ep": (
        (parallelism(ep_backend="deepep"), MOE, GPU),
        (parallelism(ep_backend="deepep", ep=8), MOE, GPU),
    ),
    "deepep-clipping": (
        (parallelism(ep_backend="deepep", ep=8), MOE, GPU),
        (on(parallelism(ep_backend="deepep", ep=8), trainer(optimizer={"max_norm": None})), MOE, GPU),
    ),
    "deepep-gpu": (
        (parallelism(ep_backend="deepep", ep=2), MOE, CPU),
        (parallelism(ep_backend="deepep", ep=2), MOE, GPU),
    ),
    "deepep-compile": (
        (on(parallelism(ep_backend="deepep", ep=2), trainer(compile=True)), MOE, GPU),
        (on(parallelism(ep=2), trainer(compile=True)), MOE, GPU),
    ),
    "deepep-dtype": (
        (on(parallelism(ep_backend="deepep", ep=2), {"model": {"dtype": "float32"}}), MOE, GPU),
        (on(parallelism(ep=2), {"model": {"dtype": "float32"}}), MOE, GPU),
    ),
    "deepep-sms": (
        (parallelism(ep=2, deepep_num_sms=20), MOE, GPU),
        (parallelism(ep=2, deepep_num_sms=20, ep_backend="deepep"), MOE, GPU),
    ),
    "deepep-chunk": (
        (parallelism(ep=2, deepep_token_chunk=2**17, ep_backend="deepep"), MOE, GPU),
        (parallelism(ep=2, deepep_token_chunk=2048, ep_backend="deepep"), MOE, GPU),
    ),
    "grouped-products": (
        (trainer(grouped_mm=False, compile=True), MOE, GPU),
        (trainer(grouped_mm=False, lora={"targets": ["q_proj"]}), MOE, GPU),
    ),
    "trainer-ep-dense": ((parallelism(ep=2), DENSE, GPU), (parallelism(ep=2), MOE, GPU)),
    "trainer-ep-divides": (
        (on(parallelism(ep=24), deployment={"train": {"nodes": 3}}), MOE, GPU),
        (on(parallelism(ep=8), deployment={"train": {"nodes": 3}}), MOE, GPU),
    ),
    "trainer-ep-shards": (
        (on(parallelism(ep=8), deployment={"train": {"nodes": 5}}), MOE, GPU),
        (on(parallelism(ep=8), deployment={"train": {"nodes": 6}}), MOE, GPU),
    ),
    "trainer-cp-divides": (
        (on(parallelism(cp=8), seq_len=1004), MOE, GPU),
        (on(parallelism(cp=8), seq_len=1000), MOE, GPU),
    ),
    "trainer-cp-heads": (
        (parallelism(cp=8), "odd heads", GPU),
        (parallelism(cp=8, cp_style="allgather"), "odd heads", GPU),
    ),
    "trainer-cp-recurrent-heads": (
        (on(parallelism(cp=8), seq_len=1024), "odd recurrent heads", GPU),
        (on(parallelism(cp=8), seq_len=1024), HYBRID, GPU),
    ),
    "trainer-cp-recurrent-style": (
        (parallelism(cp=2, cp_style="allgather"), HYBRID, GPU),
        (parallelism(cp=2), HYBRID, GPU),
    ),
    "trainer-fp8-gpu": (
        (trainer(fp8=True), MOE, {"nodes": {"default": {"gres": "gpu:b200"}}}),
        (trainer(fp8=True), MOE, GPU),
    ),
    "fp8-both": ((trainer(fp8=True), MOE, GPU), (on(trainer(fp8=True), inference(quantization="fp8")), MOE, GPU)),
    "lora-files": (
        (on(trainer(lora={"save_adapter": True}), weights={"transport": "nccl"}), MOE, GPU),
        (on(trainer(lora={}), weights={"transport": "nccl"}), MOE, GPU),
    ),
    "lora-quantised": (
        (on(trainer(lora={}, fp8=True), inference(quantization="fp8")), MOE, GPU),
        (on(trainer(lora={}, fp8=True)), MOE, GPU),
    ),
    "lora-absorbed": (
        (trainer(lora={"targets": ["q_a_proj", "kv_b_proj"]}), GLM, GPU),
        (trainer(lora={"targets": ["q_a_proj"]}), GLM, GPU),
    ),
    "lora-engines": (
        (trainer(lora={"engines": "adapter"}), MOE, GPU),
        (trainer(lora={"engines": "adapter"}), DENSE, GPU),
    ),
    "lora-targets": (
        (trainer(lora={"targets": ["q_prj"]}), MOE, GPU),
        (trainer(lora={"targets": ["q_proj"]}), MOE, GPU),
    ),
    "weight-deltas": (
        (on(trainer(lora={"engines": "adapter"}), weights={"deltas": True}), DENSE, GPU),
        (on(trainer(lora={"engines": "merged"}), weights={"deltas": True}), DENSE, GPU),
    ),
    "colocated-nccl": ((on(COLOCATED, weights={"transport": "nccl"}), MOE, GPU), (COLOCATED, MOE, GPU)),
    "teacher-images": (
        (on(TEACHER, model={"vlm": {"freeze_vision_encoder": True}}), MOE, GPU),
        (TEACHER, MOE, GPU),
    ),
    "teacher-room": ((HINTED, MOE, GPU), (on(HINTED, model={"max_len": 2**17}), MOE, GPU)),
    "teacher-temperature": (
        (on(TEACHER, orchestrator={"sampling": {"temperature": 0.7}}), MOE, GPU),
        (TEACHER, MOE, GPU),
    ),
    "vision-dtype": (
        ({"model": {"dtype": "float32"}}, "vision", GPU),
        ({"model": {"dtype": "bfloat16"}}, "vision", GPU),
    ),
    "vision-lora": (
        (on(trainer(lora={}), model={"vlm": {"freeze_vision_encoder": False}}), "vision", GPU),
        (on(trainer(lora={}), model={"vlm": {}}), "vision", GPU),
    ),
    "draft-layer-used": ((on(DRAFTED, speculative("ngram")), MOE, GPU), (on(DRAFTED, speculative("mtp")), GLM, GPU)),
    "draft-layer-count": ((DRAFTED, "two draft layers", GPU), (DRAFTED, GLM, GPU)),
    "draft-layer-alone": ((on(DRAFTED, parallelism(cp=2)), GLM, GPU), (on(DRAFTED, parallelism(ep=8)), GLM, GPU)),
    "offload-optimizer": (
        (trainer(optimizer={"type": "muon"}, memory={"optimizer_offload": True}), MOE, GPU),
        (trainer(optimizer={"type": "adamw"}, memory={"optimizer_offload": True}), MOE, GPU),
    ),
    "offload-once": (
        (trainer(memory={"optimizer_offload": True, "optimizer_state_offload": True}), MOE, GPU),
        (trainer(optimizer={"type": "muon"}, memory={"optimizer_state_offload": True}), MOE, GPU),
    ),
}  # fmt: skip


def shape_of(model: str) -> ModelShape:
    if model == "vision":
        return replace(catalog()[MOE].shape, model_type="qwen3_vl_moe")
    if model == "odd recurrent heads":
        nets = DeltaNets(layers=3, key_heads=4, value_heads=12, key_dim=128, value_dim=128, conv=4)
        return replace(catalog()[MOE].shape, delta_nets=nets)
    if model == "two draft layers":
        return replace(catalog()[GLM].shape, draft_layers=2)
    if model == "FP8 blocks":
        return replace(catalog()[MOE].shape, quantization="fp8", fp8_blocks=True)
    return replace(catalog()[DENSE].shape, heads=20) if model == "odd heads" else catalog()[model].shape


def context(changes: dict[str, Any], model: str, site_changes: dict[str, Any]) -> RuleContext:
    recipe, where = Recipe.model_validate(recipe_data(**changes)), site(**site_changes)
    return RuleContext(recipe, where, resource_requests(recipe, where), shape_of(model))


def broken(changes: dict[str, Any], model: str, site_changes: dict[str, Any]) -> set[str]:
    found = {(finding.field, finding.text) for finding in conflicts(context(changes, model, site_changes))}
    return {
        name
        for name, rule in RULES.items()
        if any(field == rule.field and text.startswith(f"{rule.rule}: ") for field, text in found)
    }


def test_every_rule_has_an_example() -> None:
    assert set(EXAMPLES) == set(RULES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_rule_fires_only_for_a_recipe_that_breaks_it(name: str) -> None:
    breaks, keeps = EXAMPLES[name]
    assert name in broken(*breaks)
    assert name not in broken(*keeps)


def test_uneven_recurrent_heads_suggest_the_nearest_cp() -> None:
    found = conflicts(context(on(parallelism(cp=8), seq_len=1024), "odd recurrent heads", GPU))
    (text,) = [finding.text for finding in found if "recurrent" in finding.text]
    assert "12 of recurrent layers" in text and text.endswith("cp: 8; nearest: 4")


def test_mtp_needs_draft_layers_even_in_a_family_that_has_them() -> None:
    changed = context(speculative("mtp"), GLM, GPU)
    found = conflicts(replace(changed, shape=replace(shape_of(GLM), draft_layers=0)))
    assert [finding.text for finding in found if finding.field == "inference.speculative.method"] == [
        "mtp needs a checkpoint with draft layers: this model of type glm_moe_dsa has none"
    ]


def test_a_small_recipe_breaks_no_rule() -> None:
    assert broken({}, MOE, GPU) == set()


def test_all_conflicts_are_reported_in_one_pass() -> None:
    llmd = inference(router={"type": "llm-d"})
    changes = on(REPLAY, PD, MOONCAKE, llmd, trainer(lora={"save_adapter": True}), weights={"transport": "nccl"})
    assert {"replay-llm-d", "replay-dense", "lora-files"} <= broken(changes, DENSE, GPU)


def test_deltas_need_files_and_concern_rl_only() -> None:
    changes = {"weights": {"deltas": True, "transport": "nccl"}}
    assert "weight-deltas" in broken(changes, MOE, GPU)
    assert not broken(on(changes, SFT), MOE, GPU)


def test_engine_rules_do_not_apply_to_sft() -> None:
    changes = on(inference(eplb=True), SFT)
    assert not broken(changes, MOE, GPU)


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        (inference(quantization="fp8"), MOE),
        ({}, "FP8 blocks"),
        (trainer(fp8=True), "FP8 blocks"),
    ],
)
def test_lora_is_refused_if_engines_quantise(changes: dict[str, Any], model: str) -> None:
    assert "lora-quantised" in broken(on(changes, trainer(lora={})), model, GPU)
    assert "lora-quantised" not in broken(changes, model, GPU)
    assert "lora-quantised" not in broken(on(trainer(lora={}), SFT), model, GPU)


def test_served_quantised_checkpoint_must_not_be_quantised_again() -> None:
    serve = on(inference(quantization="fp8"), task="serve", environments=[])
    assert "quantised-twice" in broken(serve, OSS, GPU)
    assert "quantised-twice" not in broken(serve, MOE, GPU)
