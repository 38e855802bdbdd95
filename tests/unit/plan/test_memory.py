"""The memory model: published sizes, measurements, and properties that always hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_model import TRAINER_ROWS, predicted_gib
from primeslurm.models.catalog import CATALOG, catalog
from primeslurm.models.hf_config import shape_of
from primeslurm.models.shape import Mamba, ModelShape, Vision
from primeslurm.plan.checks.files import model_files
from primeslurm.plan.estimates.activations import Mixer, delta_net, images_of, layers_of, mamba
from primeslurm.plan.estimates.engine_memory import (
    EngineLayout,
    engine_memory,
    kv_bytes_per_token,
    low_latency_bytes,
    prompt_logit_bytes,
)
from primeslurm.plan.estimates.estimate import SAMPLED, engine_layout, trainer_layout
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.estimates.rollout_rate import decode_seconds
from primeslurm.plan.estimates.step_time import moving_state
from primeslurm.plan.estimates.trainer_memory import TrainerLayout, layer_gather_bytes, trainer_memory
from primeslurm.plan.forecast import Quantity
from primeslurm.plan.gpus import GIB, GPUS, gpu_of
from primeslurm.plan.model import Finding
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import merge
from tests.support.planning import make_plan, reviewed
from tests.support.recipes import model_dir, recipe_data, site

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
GLM, QWEN = catalog()["zai-org/GLM-5.1"].shape, catalog()["Qwen/Qwen3-30B-A3B"].shape
BF16 = EngineLayout(1, 1, 2, 2, False, 8192, True, None)
SHARDED = TrainerLayout(shard=8, ep=1, tokens=16384, checkpointing="full")

QWEN_3_5_35B_A3B: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
}


@pytest.mark.parametrize("name", catalog())
def test_parameters_are_those_published(name: str) -> None:
    entry = catalog()[name]
    assert count(entry.shape).total / 1e9 == pytest.approx(entry.parameters_b, rel=0.015)
    assert count(entry.shape).active / 1e9 == pytest.approx(entry.active_b, rel=0.09)


@pytest.mark.parametrize("row", TRAINER_ROWS, ids=lambda row: f"{row.model}-{row.mode}-{row.seq_len}")
def test_trainer_memory_is_within_a_fifth_of_prime_rls_measurements(row: Any) -> None:
    assert predicted_gib(row) == pytest.approx(row.measured_gib, rel=0.2)


def test_one_glm5_layer_in_float32_is_forty_gigabytes_without_expert_parallelism() -> None:
    assert layer_gather_bytes(GLM, 1, 4) / 1e9 == pytest.approx(39.5, abs=0.1)
    assert layer_gather_bytes(GLM, 8, 4) / 1e9 == pytest.approx(5.7, abs=0.2)


def test_kv_bytes_per_token_follow_the_kind_of_attention() -> None:
    assert kv_bytes_per_token(QWEN, BF16) == 48 * 2 * 4 * 128 * 2
    assert kv_bytes_per_token(QWEN, replace(BF16, tp=2)) == 48 * 2 * 2 * 128 * 2
    assert kv_bytes_per_token(QWEN, replace(BF16, tp=8)) == 48 * 2 * 1 * 128 * 2  # a head is not split
    assert kv_bytes_per_token(QWEN, replace(BF16, fp8_kv=True)) == 48 * 2 * 4 * 128
    assert kv_bytes_per_token(GLM, BF16) == 78 * ((512 + 64) * 2 + 132)
    assert kv_bytes_per_token(GLM, replace(BF16, tp=8)) == kv_bytes_per_token(GLM, BF16)
    assert kv_bytes_per_token(GLM, replace(BF16, fp8_kv=True)) == 78 * (656 + 132)


def test_delta_nets_have_a_state_instead_of_keys_and_values() -> None:
    shape = QWEN_3_5
    assert shape.layers == 40
    assert count(shape).total == pytest.approx(34_660_610_688, rel=1e-5), "parameters of the model in transformers"
    assert kv_bytes_per_token(shape, BF16) == 10 * 2 * 2 * 256 * 2
    state = 30 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    assert engine_memory(shape, BF16, 140 * GIB, 0.9).state_per_sequence == state


def test_sliding_windows_and_mamba_state_belong_to_the_sequence() -> None:
    oss, hybrid = (
        catalog()["openai/gpt-oss-120b"].shape,
        catalog()["nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"].shape,
    )
    assert kv_bytes_per_token(oss, BF16) == 18 * 2 * 8 * 64 * 2
    assert engine_memory(oss, BF16, 80 * GIB, 0.9).state_per_sequence == 18 * 128 * 2 * 8 * 64 * 2
    assert kv_bytes_per_token(hybrid, BF16) == 12 * 2 * 2 * 128 * 2
    assert engine_memory(hybrid, BF16, 80 * GIB, 0.9).state_per_sequence > 48 * 256 * 64 * 128 * 4


def test_wider_expert_parallelism_leaves_more_kv() -> None:
    free = [engine_memory(GLM, replace(BF16, ep=ep, weight_bytes=1), 139.8 * GIB, 0.8).kv for ep in (8, 16, 32, 64)]
    assert free == sorted(free)
    assert free[0] < 20 * GIB < 60 * GIB < free[2]


def test_sharding_divides_states_and_context_parallelism_divides_activations() -> None:
    one, two = trainer_memory(QWEN, SHARDED), trainer_memory(QWEN, replace(SHARDED, shard=16, tokens=8192))
    assert (one.weights, one.optimizer) == (2 * two.weights, 2 * two.optimizer)
    assert (one.activations, one.logits) == (2 * two.activations, 2 * two.logits)
    assert one.weights + one.gradients + one.optimizer == pytest.approx(16 * count(QWEN).total / 8)


def test_offload_moves_masters_gradients_and_optimizer_to_the_host() -> None:
    here, away = trainer_memory(QWEN, SHARDED), trainer_memory(QWEN, replace(SHARDED, optimizer_offload=True))
    assert (away.weights, away.gradients, away.optimizer) == (0, 0, 0)
    assert (here.host, away.host) == (0, here.weights + here.gradients + here.optimizer)


def test_offloaded_optimizer_state_needs_only_buffers_on_the_gpu() -> None:
    here, away = trainer_memory(QWEN, SHARDED), trainer_memory(QWEN, replace(SHARDED, state_offload=True))
    assert (away.weights, away.gradients, away.optimizer) == (here.weights, here.gradients, 0)
    assert away.host == here.optimizer and away.total == here.total - here.optimizer
    small = replace(SHARDED, shard=1, tokens=1, ep=128, logit_tokens=1)
    here, away = trainer_memory(QWEN, small), trainer_memory(QWEN, replace(small, state_offload=True))
    beside = here.gathered + here.activations + here.logits
    assert away.optimizer + beside == 3 * 8 * QWEN.vocab * QWEN.hidden, (
        "buffers for the embedding, because activations are small"
    )


def test_time_to_move_optimizer_state_is_estimated() -> None:
    train = {"deployment": {"train": {"nodes": 12}}}
    offload = {"trainer": {"memory": {"optimizer_state_offload": True}}}
    found = amounts(**merge(train, offload))
    own = 8 * count(GLM).total / 96 / 1e9
    assert found["optimizer state moved"] == pytest.approx(own, rel=0.01)
    assert moving_state(own * 1e9, 8, 47e9) == pytest.approx(2 * 8 * own / 200), "host memory is read and written"
    assert moving_state(own * 1e9, 1, 47e9) == pytest.approx(own / 47), "the link takes longer"
    assert "optimizer state moved" not in amounts(**train)


def test_a_copy_for_checkpoints_is_in_host_memory() -> None:
    plain, staged = trainer_memory(QWEN, SHARDED), trainer_memory(QWEN, replace(SHARDED, staged=True))
    assert staged.host == plain.weights + plain.optimizer
    assert staged.total == plain.total


def test_trained_draft_layer_counts_as_one_layer_more() -> None:
    plain, drafts = (amounts(trainer=trainer) for trainer in ({}, {"draft_layer": {}}))
    layer = 1e9 * (drafts["parameters"] - plain["parameters"])
    assert layer == pytest.approx(count(GLM).layers / GLM.layers, rel=0.05)
    assert drafts["checkpoint"] - plain["checkpoint"] == pytest.approx(12 * layer / 1e9, rel=0.01)
    assert drafts["policy"] - plain["policy"] == pytest.approx(2 * layer / 1e9, rel=0.01)
    without, beside = (trainer_memory(shape, SHARDED) for shape in (QWEN, QWEN.with_draft_layer))
    assert beside.activations - without.activations == SHARDED.tokens * QWEN.hidden * 2
    assert trainer_memory(QWEN, replace(SHARDED, draft_layer=True)).logits == 1.25 * without.logits
    dense = replace(QWEN, dense_layers=QWEN.layers, expert_layers=(), experts=None)
    assert count(dense.with_draft_layer).layers == pytest.approx((1 + 1 / dense.layers) * count(dense).layers)


def test_offloaded_activations_leave_two_layers_behind() -> None:
    here, away = trainer_memory(QWEN, SHARDED), trainer_memory(QWEN, replace(SHARDED, activation_offload=True))
    layer = SHARDED.tokens * QWEN.hidden * 2
    assert here.activations - away.activations == (QWEN.layers - 2) * layer
    assert away.host == QWEN.layers * layer


QWEN_3_5 = shape_of({"model_type": "qwen3_5_moe", "text_config": QWEN_3_5_35B_A3B})
NEMOTRON_3_NANO = Mamba(layers=23, heads=64, head_dim=64, state=128, groups=8, conv=4, chunk=128)


def recurrent(name: str) -> tuple[Mixer, dict[str, Any]]:
    """Return the estimate and the measurement of a layer of `benchmarks recurrence_memory`."""
    assert QWEN_3_5.delta_nets is not None
    estimated = {"gated_delta_net": delta_net(QWEN_3_5.delta_nets, 2048, 2), "mamba_2": mamba(NEMOTRON_3_NANO, 2688, 2)}
    return estimated[name], json.loads((RESULTS / "recurrence_memory.json").read_bytes())[name]


@pytest.mark.parametrize("name", ["gated_delta_net", "mamba_2"])
def test_recurrent_layer_memory_matches_measurements(name: str) -> None:
    mixer, measured = recurrent(name)
    kept = measured["bytes_per_token"]
    assert mixer.kept == pytest.approx(kept["none"], rel=1e-3)
    assert mixer.selective == pytest.approx(kept["selective"], rel=1e-3)
    all_saved = mixer.kept + mixer.part / 2048
    assert all_saved == pytest.approx(measured["bytes_per_token_all_saved"], rel=0.05)
    peak = measured["peak_bytes_of_16384"]
    assert peak < 16384 * 2 * mixer.kept + mixer.part < 1.25 * peak


def test_hybrid_activations_are_the_sum_over_layer_kinds() -> None:
    attention, nets = layers_of(QWEN_3_5, 2)
    assert (attention.count, nets.count) == (10, 30)
    assert attention.full == nets.full == 2048 * 2
    assert nets.none - attention.none == recurrent("gated_delta_net")[0].kept - (2 * 16 * 256 + 2 * 2 * 256) * 2
    none, full = (
        trainer_memory(QWEN_3_5, replace(SHARDED, checkpointing=kind)).activations for kind in ("none", "full")
    )
    assert none - full == 16384 * (10 * (attention.none - attention.full) + 30 * (nets.none - nets.full))


def test_context_parallelism_divides_segments_of_recurrent_layers() -> None:
    whole = replace(SHARDED, tokens=131072)
    shared = replace(whole, tokens=131072 // 4, cp=4)
    assert trainer_memory(QWEN_3_5, whole).activations == 4 * trainer_memory(QWEN_3_5, shared).activations


def encoder(name: str) -> tuple[Vision, dict[str, Any]]:
    """Return an encoder of `benchmarks vision_memory` with four blocks, and its measured bytes per patch."""
    vision = {"depth": 4, "out_hidden_size": 2048} | (
        {"deepstack_visual_indexes": [0, 1, 2]} if name == "qwen3_vl_moe" else {}
    )
    found = shape_of({"model_type": name, "text_config": QWEN_3_5_35B_A3B, "vision_config": vision}).vision
    assert found is not None
    return found, json.loads((RESULTS / "vision_memory.json").read_bytes())["bytes_per_patch"][name]


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_vision_encoder_memory_matches_measurements(name: str) -> None:
    vision, measured = encoder(name)
    each = images_of(vision, 2)
    assert each.block == pytest.approx(measured["frozen"]["forward"], rel=0.05)
    assert each.ends + vision.depth * each.block == pytest.approx(measured["none"]["kept"], rel=0.05)
    assert each.ends + vision.depth * each.input == pytest.approx(measured["full"]["kept"], rel=0.05)
    backward = measured["full"]["backward"]
    assert backward < each.ends + vision.depth * each.input + each.block < 2.1 * backward


VL = catalog()["Qwen/Qwen3-VL-30B-A3B-Instruct"].shape


def test_a_frozen_encoder_has_weights_and_no_gradients() -> None:
    frozen, trained = (trainer_memory(VL, replace(SHARDED, frozen_vision=frozen)) for frozen in (True, False))
    size = count(VL).vision
    assert size == 538_631_408, "parameters of the model in transformers"
    assert frozen.weights == trained.weights == 4 * count(VL).total // 8
    assert trained.gradients - frozen.gradients == pytest.approx(4 * size / 8, rel=1e-6)
    assert trained.optimizer - frozen.optimizer == pytest.approx(8 * size / 8, rel=1e-6)
    assert frozen.images == trained.images == 0, "rows of text have no images"


def test_context_parallel_ranks_do_not_share_images() -> None:
    assert VL.vision is not None
    each, patches = images_of(VL.vision, 2), 16384 * 4
    rows = replace(SHARDED, images=True)
    whole, shared = (trainer_memory(VL, replace(rows, tokens=16384 // cp, cp=cp)) for cp in (1, 4))
    assert whole.images == shared.images == patches * (each.pixels + each.features)
    trained = [
        trainer_memory(VL, replace(rows, frozen_vision=False, checkpointing=kind)).images for kind in ("full", "none")
    ]
    kept = [each.pixels + each.features + each.ends + 27 * size for size in (each.input, each.block)]
    assert trained == [patches * size for size in kept]


def test_optimizers_differ_in_their_state() -> None:
    states = [trainer_memory(QWEN, replace(SHARDED, state_bytes=size)).optimizer for size in (8, 4, 0)]
    assert states == [2 * states[1], states[1], 0]


def test_weights_that_stay_gathered_are_the_whole_model() -> None:
    kept = trainer_memory(QWEN, replace(SHARDED, reshard=False)).gathered
    assert kept > 2 * 0.95 * count(QWEN).total
    assert trainer_memory(QWEN, replace(SHARDED, reshard=False, ep=8)).gathered < kept / 4


def test_a_small_model_on_one_gpu_keeps_copies_of_its_weights() -> None:
    recipe, small = Recipe.model_validate(recipe_data()), catalog()["Qwen/Qwen3-0.6B"].shape
    assert not trainer_layout(recipe, 1, small).reshard
    assert trainer_layout(recipe, 2, small).reshard and trainer_layout(recipe, 1, QWEN).reshard


@pytest.mark.parametrize(("cp", "tokens", "expected"), [(1, 8192, 8192), (4, 8192, 8192), (4, 1024, 1024), (4, 1, 512)])
def test_tokens_per_gpu_do_not_depend_on_context_parallelism(cp: int, tokens: int, expected: int) -> None:
    trainer = {"micro_batch_tokens": tokens, "parallelism": {"cp": cp}}
    recipe = Recipe.model_validate(recipe_data(seq_len=2048, trainer=trainer))
    assert trainer_layout(recipe, 8, QWEN).tokens == expected


@pytest.mark.parametrize("shape", [QWEN, GLM], ids=["qwen", "glm"])
def test_gradients_reduced_once_per_step_stay_unsharded(shape: ModelShape) -> None:
    split, parameters = replace(SHARDED, ep=8), count(shape)
    each, once = (trainer_memory(shape, replace(split, reduced_once=choice)) for choice in (False, True))
    assert once.gradients - each.gradients == 4 * (parameters.language - parameters.experts * 7 // 8)
    assert replace(once, gradients=0) == replace(each, gradients=0)
    adapters = [
        trainer_memory(shape, replace(split, reduced_once=choice, lora_parameters=10**6)).gradients
        for choice in (False, True)
    ]
    assert adapters[1] - adapters[0] == 4 * 10**6


def test_prompt_logits_match_vllm_peak() -> None:
    measured = json.loads((RESULTS / "memory_model.json").read_bytes())["prompt_logits_of_vllm"]
    shape = replace(QWEN, vocab=measured["vocab"])
    steps = [replace(BF16, batched_tokens=tokens) for tokens in (measured["tokens"], 2 * measured["tokens"])]
    assert [prompt_logit_bytes(shape, layout) for layout in steps] == pytest.approx([measured["bytes"]] * 2, rel=1e-3)


def test_prompt_logits_replace_sampling_logits() -> None:
    asked = [replace(BF16, prompt_logprobs=True, tp=tp, dtype_bytes=size) for tp, size in ((1, 2), (8, 2), (8, 4))]
    more = [
        engine_memory(QWEN, layout, 140 * GIB, 0.9).reserve
        - engine_memory(QWEN, replace(layout, prompt_logprobs=False), 140 * GIB, 0.9).reserve
        for layout in asked
    ]
    sampling = 1024 * QWEN.vocab * 8
    assert more == [0, 0, prompt_logit_bytes(QWEN, asked[2]) - sampling]
    assert 0 < more[2] < sampling


def test_an_encoder_that_sees_stays_gathered_with_the_layers() -> None:
    kept = replace(SHARDED, reshard=False)
    blind, seeing = (trainer_memory(VL, replace(kept, images=images)).gathered for images in (False, True))
    assert seeing - blind == 2 * count(VL).vision
    assert trainer_memory(VL, replace(SHARDED, images=True)).gathered == trainer_memory(VL, SHARDED).gathered


def test_low_latency_buffers_grow_with_tokens_and_experts() -> None:
    assert low_latency_bytes(GLM, 96) / 1e9 == pytest.approx(1.2, abs=0.05)
    assert low_latency_bytes(GLM, 8192) > 100e9


def test_the_gpu_is_named_by_its_field_or_its_gres() -> None:
    kind = site(nodes={"default": {"gres": "gpu:h200"}}).nodes["default"]
    assert gpu_of(kind) is GPUS["h200"]
    assert gpu_of(kind.model_copy(update={"gpu": "B200"})) is GPUS["b200"]
    assert gpu_of(kind.model_copy(update={"gres": "gpu"})) is None


def test_unknown_config_gives_no_shape() -> None:
    with pytest.raises(KeyError):
        shape_of({"model_type": "bert"})


@pytest.mark.parametrize(
    "damage",
    [{"num_hidden_layers": "many"}, {"decoder_sparse_step": 0}, {"text_config": "none"}, {"num_attention_heads": 0}],
    ids=str,
)
def test_a_damaged_config_gives_no_estimate(damage: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads(CATALOG.read_bytes())["Qwen/Qwen3-30B-A3B"]["config"]
    model = model_dir(tmp_path, **{**config, "head_dim": None, **damage})
    files = model_files(Recipe.model_validate(recipe_data(model={"path": str(model)})))
    assert (files.shape, files.model_type, files.problems) == (None, "qwen3_moe", ())


def found(changes: dict[str, Any], model: str = "zai-org/GLM-5.1", gres: str = "gpu:h200", **more: Any) -> list[str]:
    """Return findings about memory of a recipe with one train node and one inference node."""
    nodes = {"nodes": {"default": {"gres": gres, "mem": "1900G", **more}}}
    recipe = Recipe.model_validate(recipe_data(**merge({"model": {"path": model, "dtype": "bfloat16"}}, changes)))
    findings, _ = reviewed(recipe, site(**nodes))
    return [f"{f.level} {f.field}: {f.text}" for f in findings if "fit" in f.text or "memory" in f.text]


def test_a_model_that_does_not_fit_is_refused_with_the_reason() -> None:
    trainer, engines = found({})
    assert trainer.startswith("error deployment.train: does not fit: needs 2375.5 of 139.8 GiB per GPU")
    assert "optimizer 692.8" in trainer
    assert engines.startswith("error inference: does not fit: weights 1")


def test_a_sequence_longer_than_the_kv_cache_is_refused() -> None:
    changes = {"seq_len": 40960, "inference": {"kv_cache_bytes": 2**30}, "deployment": {"train": {"nodes": 4}}}
    texts = found(changes, "Qwen/Qwen3-30B-A3B")
    assert any("the KV cache of a GPU holds 10,922 tokens, but one sequence may have 40,960" in text for text in texts)


@pytest.mark.parametrize(
    ("inference", "fields"),
    [
        ({"kv_cache_bytes": 2 * 10**11}, ["inference.kv_cache_bytes"]),
        ({"kv_cache_bytes": 10**11}, []),
        ({"kv_cache_bytes": 10**10, "decode": {"kv_cache_bytes": 2 * 10**11}}, ["inference.decode.kv_cache_bytes"]),
    ],
    ids=str,
)
def test_a_kv_cache_larger_than_the_gpu_is_refused(inference: dict[str, Any], fields: list[str]) -> None:
    shape = {"layout": "het", "train": {"nodes": 4}}
    if "decode" in inference:
        shape["inference"] = {"type": "disaggregated"}
    findings = errors({"inference": inference, "deployment": shape})
    assert [finding.field for finding in findings] == fields
    assert all("of 139.8 GiB of a GPU" in finding.text for finding in findings)


COLOCATED: dict[str, Any] = {
    "deployment": {"layout": "one_node", "colocated": True, "train": {"gpus_per_node": 8}},
    "trainer": {"parallelism": {"activation_checkpointing": "full"}},
}


@pytest.mark.parametrize(
    ("utilization", "refused"), [(0.5, []), (0.9, ["deployment.train"]), (0.1, ["inference"])], ids=str
)
def test_colocated_roles_must_fit_their_shares_of_a_gpu(utilization: float, refused: list[str]) -> None:
    """The trainer gets what the engines leave, less the CUDA context that vLLM does not count."""
    changes = merge(COLOCATED, {"inference": {"gpu_memory_utilization": utilization}})
    texts = found(changes, "Qwen/Qwen3-8B")
    assert [text.split(":")[0].removeprefix("error ") for text in texts if text.startswith("error")] == refused
    assert all("gpu_memory_utilization" in finding.fix for finding in errors(changes))


def errors(changes: dict[str, Any]) -> list[Finding]:
    data = recipe_data(**merge({"model": {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"}}, changes))
    findings, _ = reviewed(Recipe.model_validate(data), site(nodes={"default": {"gres": "gpu:h200"}}))
    return [finding for finding in findings if finding.level == "error"]


def test_plan_sets_the_kv_cache_of_colocated_engines(tmp_path: Path) -> None:
    """vLLM would measure too little memory beside a working trainer."""
    changes = merge(COLOCATED, {"inference": {"gpu_memory_utilization": 0.5}})
    recipe = Recipe.model_validate(
        recipe_data(**merge({"model": {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"}}, changes))
    )
    where = site(nodes={"default": {"gres": "gpu:h200"}})
    plan = make_plan(recipe, where, tmp_path).plan
    assert plan.estimate is not None
    trainer, engine = plan.estimate.roles
    assert (trainer.limit_gib, engine.limit_gib) == (68.9, 69.9)
    argv = plan.process("engine-r0-0").argv
    size = int(argv[argv.index("--kv-cache-memory-bytes") + 1])
    assert size == engine.kv_tokens * engine.kv_bytes_per_token
    assert sum(engine.parts.values()) == pytest.approx(engine.limit_gib, abs=0.2)
    assert [f.field for f in plan.findings if "GPUs 0 to 7" in f.text] == ["inference.gpu_memory_utilization"]
    unknown = make_plan(recipe, site(), tmp_path).plan
    assert "--kv-cache-memory-bytes" not in unknown.process("engine-r0-0").argv
    assert [f.fix for f in unknown.findings if f.field == "inference.kv_cache_bytes"] == ["set it"]


def test_a_kv_cache_beyond_the_share_of_colocated_engines_is_refused() -> None:
    changes = merge(COLOCATED, {"inference": {"gpu_memory_utilization": 0.5, "kv_cache_bytes": 80 * GIB}})
    (finding,) = errors(changes)
    assert finding.field == "inference.kv_cache_bytes" and "KV cache 80 GiB, of 69.9 GiB" in finding.text


def test_offloaded_states_must_fit_the_host() -> None:
    changes = {"trainer": {"memory": {"optimizer_offload": True}, "parallelism": {"ep": 8}}}
    texts = found(changes, memory_gib=1000)
    assert any(text.startswith("error trainer.memory: does not fit") for text in texts)


def test_local_copies_of_checkpoints_are_planned() -> None:
    four = {"deployment": {"train": {"nodes": 4}}}
    plain = amounts(**four)
    assert "local copies" not in plain
    for moments, bytes_of_12 in (("float32", 12), ("bfloat16", 8)):
        found_here = amounts(**merge({"checkpoint": {"local": "/scratch/x", "moments": moments}}, four))
        assert found_here["local copies"] == pytest.approx(2 * plain["checkpoint"] / 4 * bytes_of_12 / 12, abs=0.1)
    alone = amounts(checkpoint={"local": "/scratch/x"}, deployment={"train": {"nodes": 1}})
    assert alone["local copies"] == alone["checkpoint"], "there is no other node that keeps a copy"


def test_local_copies_in_memory_must_fit_the_host() -> None:
    """Each of two nodes holds both halves of 366 GB: 341 GiB."""
    two = {"deployment": {"train": {"nodes": 2}, "spares": {"train": 1}}, "trainer": {"parallelism": {"ep": 8}}}
    where = {"/dev/shm": 1, "/dev/shm/x": 1, "/dev/shmoo": 0, "/scratch": 0}
    for local, errors in where.items():
        texts = found(merge(two, {"checkpoint": {"local": local}}), "Qwen/Qwen3-30B-A3B", memory_gib=300)
        assert sum("offloaded states and activations, and checkpoint copies take" in t for t in texts) == errors


def test_local_copies_on_disk_must_fit_it() -> None:
    """Each of two nodes holds both halves of 366 GB: 341 GiB."""
    two = {"deployment": {"train": {"nodes": 2}, "spares": {"train": 1}}, "trainer": {"parallelism": {"ep": 8}}}
    changes = merge(two, {"checkpoint": {"local": "/scratch"}})
    (small,), (unknown,), large = (
        [text for text in found(changes, "Qwen/Qwen3-30B-A3B", **disk) if "checkpoint.local" in text]
        for disk in ({"disk_gib": 300}, {}, {"disk_gib": 400})
    )
    text = "does not fit: checkpoint copies take 341 GiB of each train node's disk, which has 300 GiB"
    assert small == f"error checkpoint.local: {text}"
    assert unknown.startswith("note checkpoint.local: may not fit: checkpoint copies take 341 GiB") and not large
    in_memory = merge(two, {"checkpoint": {"local": "/dev/shm"}})
    assert not [text for text in found(in_memory, "Qwen/Qwen3-30B-A3B", disk_gib=1) if "checkpoint.local" in text]


@pytest.mark.parametrize(("limit", "level"), [(10, "error"), (60, "warning"), (7200, "")])
def test_stall_timeout_must_exceed_a_step(limit: int, level: str) -> None:
    """256 rows of 32k tokens take 2 min or more on 8 GPUs, and rows of 8k tokens a quarter of a minute."""
    changes = {"seq_len": 32768, "model": {"path": "Qwen/Qwen3-30B-A3B", "dtype": "bfloat16"}}
    changes |= {"orchestrator": {"batch_size": 256, "stall_timeout_s": limit}, "trainer": {"parallelism": {"ep": 8}}}
    h200 = site(nodes={"default": {"gres": "gpu:h200"}})
    findings, _ = reviewed(Recipe.model_validate(recipe_data(**changes)), h200)
    stalls = [finding for finding in findings if "stall_timeout_s" in finding.field]
    assert [(finding.level, finding.value) for finding in stalls] == [(level, str(limit))] * bool(level)
    assert all("a step of 256 rollouts of" in f.text and "set it to at least" in f.fix for f in stalls)


@pytest.mark.parametrize(("lead", "nodes", "warned"), [(120, 1, True), (300, 1, False), (120, 2, False)])
def test_last_checkpoint_must_be_written_before_the_time_limit(lead: int, nodes: int, warned: bool) -> None:
    """366 GB at 2 GB/s per node take 3 min 3 s from one node."""
    changes = {"deployment": {"train": {"nodes": nodes}}, "slurm": {"checkpoint_signal_s": lead}}
    model = {"model": {"path": "Qwen/Qwen3-30B-A3B", "dtype": "bfloat16"}}
    findings, _ = reviewed(Recipe.model_validate(recipe_data(**merge(model, changes))), site())
    late = [f for f in findings if f.field == "slurm.checkpoint_signal_s"]
    fast = site(network={"storage_gbytes_per_s": 4.0})
    assert not [f for f in reviewed(Recipe.model_validate(recipe_data(**merge(model, changes))), fast)[0] if f in late]
    assert [f.fix for f in late] == (["leave it out, or checkpoint_signal_s: 300"] if warned else [])
    assert all(f.level == "warning" and "366.4 GB from 1 node take 3 min 3 s at 2 GB/s" in f.text for f in late)


def test_unknown_gpu_gives_a_note_and_no_estimate() -> None:
    assert found({}, gres="gpu") == ["note site: memory is not estimated: the GPU type of partition gpu is unknown"]


def amounts(**changes: Any) -> dict[str, float]:
    return {amount.name: amount.value for amount in explained(**changes)}


def explained(**changes: Any) -> list[Quantity]:
    recipe = Recipe.model_validate(
        recipe_data(**merge({"model": {"path": "zai-org/GLM-5.1", "dtype": "bfloat16"}}, changes))
    )
    _, estimate = reviewed(recipe, site(nodes={"default": {"gres": "gpu:h200"}}))
    assert estimate is not None
    return list(estimate.amounts)


@pytest.mark.parametrize(
    ("ranks", "cell"), [(1, "1"), (2, "2-allgather_reducescatter"), (4, "4-allgather_reducescatter")]
)
def test_decode_steps_match_recorded_engines(ranks: int, cell: str) -> None:
    config = json.loads(CATALOG.read_bytes())["Qwen/Qwen3-30B-A3B"]["config"] | {"num_hidden_layers": 12}
    recorded = json.loads((RESULTS / f"wide_ep_h100x{max(2, ranks)}.json").read_bytes())
    layout = EngineLayout(1, ranks, 2, 2, False, 8192, True, None)
    context = recorded["tokens"]["prompt"] + recorded["tokens"]["sampled"] / 2
    seconds = decode_seconds(shape_of(config), layout, GPUS["h100"], 64, context)
    assert 1e3 * seconds == pytest.approx(recorded["cells"][cell]["ms_per_token"], rel=0.25)


def test_rollouts_say_whether_the_trainer_or_the_engines_are_slower() -> None:
    def sampled(batch: int, nodes: int) -> Quantity:
        nodes_of = {"inference": {"type": "multi_node", "num_replicas": nodes}}
        changes = {"orchestrator": {"batch_size": batch}, "deployment": nodes_of, "seq_len": 32768}
        (rate,) = (one for one in explained(model={"path": "Qwen/Qwen3-30B-A3B"}, **changes) if one.name == SAMPLED)
        assert "never measured for this model" in rate.how
        return rate

    few, many = sampled(256, 1), sampled(4096, 8)
    assert few.value < many.value and "they are the bottleneck if they sample more than" in few.how
    assert many.how.endswith("the trainer is the bottleneck")


@pytest.mark.parametrize(
    ("path", "recurrences"),
    [
        ("zai-org/GLM-5.1", ""),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", r", recurrences [\d.]+"),
    ],
)
def test_a_step_is_printed_with_its_parts_and_its_error(path: str, recurrences: str) -> None:
    train = {"deployment": {"train": {"nodes": 2}}, "seq_len": 131072, "orchestrator": {"batch_size": 256}}
    (step,) = (one for one in explained(model={"path": path}, **train) if one.name.endswith("sequences of seq_len"))
    assert re.fullmatch(
        rf"products [\d.]+(, [a-z ]+ [\d.]+)*{recurrences}(, [a-z ]+ [\d.]+)* s, within 12%; "
        r"network [\d.]+ s \(not measured\), .* in total without overlap",
        step.how,
    )


def test_routed_experts_of_a_batch_are_21_gigabytes_for_the_large_glm5_run() -> None:
    found = amounts(seq_len=131072, orchestrator={"batch_size": 256}, trainer={"router_replay": True})
    assert found["routed experts"] == pytest.approx(20.9, abs=0.1)  # 624 bytes x 131,072 x 256


def test_batch_files_are_estimated_only_for_filesystem_transport() -> None:
    asked = {"batch_size": 256, "rollout_transport": "filesystem"}
    found = amounts(seq_len=131072, orchestrator=asked, trainer={"router_replay": True})
    assert found["batch files"] == pytest.approx((624 + 18) * 131072 * 256 / 1e9, abs=0.05)
    assert amounts(seq_len=131072, orchestrator=asked)["batch files"] == pytest.approx(0.6, abs=0.05)
    assert "batch files" not in amounts(seq_len=131072, trainer={"router_replay": True})


def test_engines_from_fp8_blocks_stay_in_fp8_when_the_model_is_trained() -> None:
    recipe = Recipe.model_validate(recipe_data(model={"path": "m", "dtype": "bfloat16"}))
    for stored, size in (({"quantization": "fp8", "fp8_blocks": True}, 1.0), ({"quantization": "mxfp4"}, 2)):
        assert engine_layout(recipe, "engine", 1, replace(GLM, **stored)).weight_bytes == size


def test_sending_all_of_glm5_takes_a_minute_and_its_own_experts_to_each_gpu_much_less() -> None:
    assert amounts(weights={"transport": "nccl"})["weight update"] == pytest.approx(59.5, abs=0.5)
    wide = amounts(weights={"transport": "nccl"}, inference={"expert_parallel": True})["weight update"]
    assert 59.5 / 8 < wide < 59.5 / 6, "an eighth of the experts, and everything else"
    halved = amounts(weights={"transport": "nccl"}, inference={"quantization": "fp8"})["weight update"]
    assert halved == pytest.approx(59.5 / 2, rel=0.02)
    adapters = {"lora": {"rank": 8}}
    assert amounts(trainer=adapters)["policy"] == amounts()["policy"], "engines get the merged policy"
    assert amounts(trainer=adapters)["checkpoint"] < amounts()["checkpoint"] / 50


def test_host_tiers_are_shared_with_mooncake_and_apart_without() -> None:
    tier = {"cpu": {"bytes": 2**40}}
    shared = amounts(inference={"kv_offload": {"type": "mooncake", **tier}})["KV in host memory"]
    apart = amounts(inference={"kv_offload": {"type": "native", **tier}})["KV in host memory"]
    assert (shared, apart) == (11.0, 87.8)  # one node, or its eight engines; 100,152 bytes per token


def test_published_configurations_fit(tmp_path: Path) -> None:
    """prime-rl 0.6.0: GLM-5 on 16 train nodes, and prefill and decode groups of 2, 4 and 8 nodes at 0.75 to 0.8."""
    train = TrainerLayout(128, 8, 131072 // 4, "full", True, True, 1024, keeps_selection=False)
    assert trainer_memory(GLM, train).total < 139.8 * GIB
    for nodes, share, tokens in ((2, 0.75, 8192), (4, 0.8, 8192), (8, 0.75, 96)):
        all2all = "deepep_low_latency" if tokens == 96 else "deepep_high_throughput"
        layout = replace(BF16, ep=8 * nodes, weight_bytes=1, batched_tokens=tokens, all2all=all2all)
        assert engine_memory(GLM, layout, 139.8 * GIB, share).kv_tokens > 131072
