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

Example = tuple[dict[str, Any], str, dict[str, Any]]
"""Changes of a recipe, a model, and changes of a site."""
Pair = tuple[Example, Example]
"""What breaks a rule, and what keeps it."""


def on_same(breaks: dict[str, Any], keeps: dict[str, Any], model: str = MOE, where: Any = GPU) -> Pair:
    """Return two examples with the same model and site."""
    return (breaks, model, where), (keeps, model, where)


EXAMPLES: dict[str, Pair] = {
    "replay-llm-d": on_same(on(REPLAY, inference(router={"type": "llm-d"})), on(REPLAY, PD, MOONCAKE)),
    "replay-dynamo": on_same(on(REPLAY, DYNAMO), DYNAMO),
    "dynamo-groups": on_same(on(DYNAMO, EP), DYNAMO),
    "replay-dense": ((REPLAY, DENSE, GPU), (REPLAY, MOE, GPU)),
    "replay-workers": on_same(on(REPLAY, seq_len=32768),
        on(REPLAY, seq_len=32768, environments=[{"id": "reverse-text", "workers": 4}])),
    "mooncake-rdma": ((MOONCAKE, MOE, {"network": {"rdma": False}}), (MOONCAKE, MOE, GPU)),
    "mooncake-tcp": on_same(on(MOONCAKE, inference(kv_offload={"protocol": "tcp"})), MOONCAKE),
    "mooncake-alone": on_same(MOONCAKE, on(MOONCAKE, PD)),
    "offload-memory": on_same(inference(kv_offload={"type": "native", "cpu": {"bytes": 2**38}}),
        inference(kv_offload={"type": "native", "cpu": {"bytes": 2**37}})),
    "pinned-memory": on_same(on(PD, inference(env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})),
        inference(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})),
    "hybrid-disaggregated": ((PD, HYBRID, GPU), (PD, MOE, GPU)),
    "hybrid-offload": ((MOONCAKE, HYBRID, GPU), (MOONCAKE, MOE, GPU)),
    "kv-aware-mamba": ((KV_AWARE, HYBRID, GPU), (KV_AWARE, GLM, GPU)),
    "kv-aware-mla": on_same(on(KV_AWARE, PD), KV_AWARE, GLM),
    "kv-aware-offload": on_same(on(KV_AWARE, MOONCAKE), KV_AWARE),
    "kv-aware-images": on_same(on(KV_AWARE, model={"vlm": {}}), KV_AWARE),
    "kv-aware-readers": on_same(KV_AWARE, on(KV_AWARE, slurm={"inference": {"exclusive": True}})),
    "ep-dense": ((EP, DENSE, GPU), (EP, MOE, GPU)),
    "ep-alone": on_same(on(EP, inference(parallel={"dp": 1})), on(EP, inference(parallel={"dp": 2}))),
    "ep-divides": on_same(on(PD, EP, deployment={"inference": {"prefill": {"nodes_per_replica": 3}}}),
        on(PD, EP, deployment={"inference": {"prefill": {"nodes_per_replica": 4}}}), GLM),
    "deepep-nodes": on_same(on(PD, EP,
        deployment={"inference": {"prefill": {"nodes_per_replica": 2, "gpus_per_node": 4}}}),
        on(PD, EP, deployment={"inference": {"prefill": {"nodes_per_replica": 2}}}), GLM),
    "all2all-without-ep": on_same(inference(all2all="nixl_ep"), on(EP, inference(all2all="nixl_ep"))),
    "low-latency-tokens": on_same(decode(max_num_batched_tokens=1024), decode(max_num_seqs=96)),
    "low-latency-prefill": on_same(on(PD, EP, inference(prefill={"all2all": "deepep_low_latency"})), on(PD, EP)),
    "graphs-high-throughput": on_same(decode(all2all="deepep_high_throughput"), decode()),
    "graphs-eager": on_same(inference(enforce_eager=True, cuda_graphs="FULL"), inference(enforce_eager=True)),
    "graphs-batch": on_same(decode(max_num_seqs=1024), decode(max_num_seqs=512)),
    "seqs-tokens": on_same(inference(max_num_seqs=256, max_num_batched_tokens=128),
        inference(max_num_seqs=128, max_num_batched_tokens=128)),
    "dbo-backend": on_same(inference(dbo=True), on(PD, EP, inference(prefill={"dbo": True}))),
    "dbo-cpu": on_same(inference(dbo=True), {}, where=CPU),
    "dbo-unfinished": on_same(on(PD, EP, inference(prefill={"dbo": True})), on(PD, EP)),
    "warmup-skipped": on_same(decode(env={"VLLM_DEEP_GEMM_WARMUP": "skip"}),
        decode(env={"VLLM_DEEP_GEMM_WARMUP": "full"})),
    "warmup-skipped-fp8": on_same(inference(quantization="fp8", env={"VLLM_DEEP_GEMM_WARMUP": "skip"}),
        inference(quantization="fp8")),
    "decode-recompute": on_same(on(decode(max_num_seqs=96, max_num_batched_tokens=96), seq_len=2**17),
        on(decode(max_num_seqs=96), seq_len=2**17)),
    "eplb-ep": on_same(inference(eplb=True), on(EP, inference(eplb=True))),
    "eplb-cpu": ((on(EP, inference(eplb=True)), MOE, CPU), (on(EP, inference(eplb=True)), MOE, GPU)),
    "eplb-updates": on_same(on(EP, inference(eplb=True)), on(EP, inference(eplb=True), task="serve", environments=[])),
    "engine-fp8-gpu": ((inference(quantization="fp8"), MOE, {"nodes": {"default": {"gpu": "a100"}}}),
        (inference(quantization="fp8"), MOE, {"nodes": {"default": {"gpu": "h100"}}})),
    "quantised-twice": ((inference(quantization="fp8"), "FP8 blocks", GPU), (inference(quantization="fp8"), OSS, GPU)),
    "engine-model": on_same(inference(model="m/fp8"), inference(model="m/fp8", quantization="fp8")),
    "deep-gemm-fp8": on_same(inference(deep_gemm=True), inference(deep_gemm=True, quantization="fp8")),
    "deep-gemm-gpu": ((inference(deep_gemm=True), MOE, {"nodes": {"default": {"gres": "gpu:l40s"}}}),
        (inference(deep_gemm=True), MOE, {"nodes": {"default": {"gres": "gpu:b200"}}})),
    "batch-invariant-gpu": ((inference(batch_invariant=True), MOE, CPU), (inference(batch_invariant=True), MOE, GPU)),
    "batch-invariant-dsa": ((inference(batch_invariant=True), GLM, GPU), (inference(batch_invariant=True), MOE, GPU)),
    "batch-invariant-nccl": on_same(inference(batch_invariant=True) | {"weights": {"transport": "nccl"}},
        inference(batch_invariant=True)),
    "tp-heads": ((inference(parallel={"tp": 8}), "odd heads", GPU), (inference(parallel={"tp": 8}), MOE, GPU)),
    "speculative-mtp": ((speculative("mtp"), MOE, GPU), (speculative("mtp"), GLM, GPU)),
    "speculative-mtp-multiple": on_same(speculative("mtp", 3), speculative("mtp", 4), "two draft layers"),
    "speculative-dbo": on_same(on(PD, EP, speculative("mtp"), inference(prefill={"dbo": True})),
        on(PD, EP, speculative("ngram"), inference(prefill={"dbo": True})), GLM),
    "speculative-async": ((on(speculative("ngram"), inference(vllm_extra={"async-scheduling": True})), MOE, GPU),
        (on(speculative("mtp"), inference(vllm_extra={"async-scheduling": True})), GLM, GPU)),
    "speculative-delta-nets": ((speculative("ngram"), "odd recurrent heads", CPU),
        (speculative("ngram"), "odd recurrent heads", GPU)),
    "delta-nets-dtype": (({"model": {"path": "m", "dtype": "float32"}}, "odd recurrent heads", CPU),
        ({"model": {"path": "m", "dtype": "float32"}}, "odd recurrent heads", GPU)),
    "tp-latent": ((inference(parallel={"tp": 8}), GLM, GPU), (inference(parallel={"tp": 8}), MOE, GPU)),
    "prefix-sharing": on_same(
        on(trainer(prefix_sharing=True), parallelism(cp=2)), on(trainer(prefix_sharing=True), parallelism(ep=8)), MOE
    ),
    "trainer-compile": on_same(on(trainer(compile=True), model={"dtype": "float32"}),
        on(trainer(compile=True), model={"dtype": "bfloat16"})),
    "deepep-without-ep": on_same(parallelism(ep_backend="deepep"), parallelism(ep_backend="deepep", ep=8)),
    "deepep-clipping": on_same(parallelism(ep_backend="deepep", ep=8),
        on(parallelism(ep_backend="deepep", ep=8), trainer(optimizer={"max_norm": None}))),
    "deepep-gpu": ((parallelism(ep_backend="deepep", ep=2), MOE, CPU),
        (parallelism(ep_backend="deepep", ep=2), MOE, GPU)),
    "deepep-compile": on_same(on(parallelism(ep_backend="deepep", ep=2), trainer(compile=True)),
        on(parallelism(ep=2), trainer(compile=True))),
    "deepep-dtype": on_same(on(parallelism(ep_backend="deepep", ep=2), {"model": {"dtype": "float32"}}),
        on(parallelism(ep=2), {"model": {"dtype": "float32"}})),
    "deepep-sms": on_same(parallelism(ep=2, deepep_num_sms=20),
        parallelism(ep=2, deepep_num_sms=20, ep_backend="deepep")),
    "deepep-chunk": on_same(parallelism(ep=2, deepep_token_chunk=2**17, ep_backend="deepep"),
        parallelism(ep=2, deepep_token_chunk=2048, ep_backend="deepep")),
    "grouped-products": on_same(trainer(grouped_mm=False, compile=True),
        trainer(grouped_mm=False, lora={"targets": ["q_proj"]})),
    "trainer-ep-dense": ((parallelism(ep=2), DENSE, GPU), (parallelism(ep=2), MOE, GPU)),
    "trainer-ep-divides": on_same(on(parallelism(ep=24), deployment={"train": {"nodes": 3}}),
        on(parallelism(ep=8), deployment={"train": {"nodes": 3}})),
    "trainer-ep-shards": on_same(on(parallelism(ep=8), deployment={"train": {"nodes": 5}}),
        on(parallelism(ep=8), deployment={"train": {"nodes": 6}})),
    "trainer-cp-divides": on_same(on(parallelism(cp=8), seq_len=1004), on(parallelism(cp=8), seq_len=1000)),
    "trainer-cp-heads": on_same(parallelism(cp=8), parallelism(cp=8, cp_style="allgather"), "odd heads"),
    "trainer-cp-recurrent-heads": ((on(parallelism(cp=8), seq_len=1024), "odd recurrent heads", GPU),
        (on(parallelism(cp=8), seq_len=1024), HYBRID, GPU)),
    "trainer-cp-recurrent-style": on_same(parallelism(cp=2, cp_style="allgather"), parallelism(cp=2), HYBRID),
    "trainer-fp8-gpu": ((trainer(fp8=True), MOE, {"nodes": {"default": {"gres": "gpu:b200"}}}),
        (trainer(fp8=True), MOE, GPU)),
    "fp8-both": on_same(trainer(fp8=True), on(trainer(fp8=True), inference(quantization="fp8"))),
    "lora-files": on_same(on(trainer(lora={"save_adapter": True}), weights={"transport": "nccl"}),
        on(trainer(lora={}), weights={"transport": "nccl"})),
    "lora-quantised": on_same(on(trainer(lora={}, fp8=True), inference(quantization="fp8")),
        on(trainer(lora={}, fp8=True))),
    "lora-absorbed": on_same(trainer(lora={"targets": ["q_a_proj", "kv_b_proj"]}),
        trainer(lora={"targets": ["q_a_proj"]}), GLM),
    "lora-engines": ((trainer(lora={"engines": "adapter"}), MOE, GPU),
        (trainer(lora={"engines": "adapter"}), DENSE, GPU)),
    "lora-targets": on_same(trainer(lora={"targets": ["q_prj"]}), trainer(lora={"targets": ["q_proj"]})),
    "weight-deltas": on_same(on(trainer(lora={"engines": "adapter"}), weights={"deltas": True}),
        on(trainer(lora={"engines": "merged"}), weights={"deltas": True}), DENSE),
    "colocated-nccl": on_same(on(COLOCATED, weights={"transport": "nccl"}), COLOCATED),
    "teacher-images": on_same(on(TEACHER, model={"vlm": {"freeze_vision_encoder": True}}), TEACHER),
    "teacher-room": on_same(HINTED, on(HINTED, model={"max_len": 2**17})),
    "teacher-temperature": on_same(on(TEACHER, orchestrator={"sampling": {"temperature": 0.7}}), TEACHER),
    "vision-dtype": on_same({"model": {"dtype": "float32"}}, {"model": {"dtype": "bfloat16"}}, "vision"),
    "vision-lora": on_same(on(trainer(lora={}), model={"vlm": {"freeze_vision_encoder": False}}),
        on(trainer(lora={}), model={"vlm": {}}), "vision"),
    "draft-layer-used": ((on(DRAFTED, speculative("ngram")), MOE, GPU), (on(DRAFTED, speculative("mtp")), GLM, GPU)),
    "draft-layer-count": ((DRAFTED, "two draft layers", GPU), (DRAFTED, GLM, GPU)),
    "draft-layer-alone": on_same(on(DRAFTED, parallelism(cp=2)), on(DRAFTED, parallelism(ep=8)), GLM),
    "offload-optimizer": on_same(trainer(optimizer={"type": "muon"}, memory={"optimizer_offload": True}),
        trainer(optimizer={"type": "adamw"}, memory={"optimizer_offload": True})),
    "offload-once": on_same(trainer(memory={"optimizer_offload": True, "optimizer_state_offload": True}),
        trainer(optimizer={"type": "muon"}, memory={"optimizer_state_offload": True})),
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
