"""The benchmark of training steps at a tiny size, and its operation counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config

from benchmarks.training_models import SHAPES, attention_flops, expert_count, matrix_flops
from benchmarks.training_speed import arguments, document_lengths, make_recipe, measure, ours
from primeslurm.models import family_of
from primeslurm.trainer.distributed.world import World

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}


def test_both_steps_are_timed(world: World) -> None:
    options = ["--layers", "1", "--seq", "64", "--rows", "2", "--steps", "1", "--lm-head-chunk", "64", "--vocab", "256"]
    actual = measure(arguments([*options, "--against", "torchtitan"]), world)
    assert actual["tokens_per_step"] == 128 and actual["speed_ratio"] > 0
    assert actual["ours"]["tokens_per_s"] > 0 and actual["torchtitan"]["tokens_per_s"] > 0


def test_compiled_and_eager_steps_are_timed(world: World) -> None:
    options = ["--layers", "1", "--seq", "64", "--documents", "3", "--steps", "1", "--vocab", "256"]
    actual = measure(arguments([*options, "--against", "eager"]), world)
    assert actual["speed_ratio"] > 0
    assert actual["first_step"] == actual["eager_first_step"], "the same weights and rows"
    lengths = document_lengths(64, 1, 3)
    assert sum(lengths) == 8 * 64 and len(lengths) == sum((1, 1, 1, 1, 2, 2, 2, 3))
    config = SHAPES["tiny"].build(1, None, 256)
    keys = sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)
    a_key = attention_flops(config, 1, causal=True)
    rest = actual["flops_per_token"] - a_key * keys
    whole = measure(arguments(["--layers", "1", "--seq", "64", "--steps", "1", "--vocab", "256"]), world)
    assert whole["flops_per_token"] - rest == pytest.approx(a_key * 32.5), "no key of another document is counted"


def test_features_that_torchtitan_lacks_are_rejected(world: World) -> None:
    with pytest.raises(SystemExit, match="it has Qwen3's shapes"):
        measure(arguments(["--shape", "glm5", "--against", "torchtitan"]), world)


def test_counted_matrix_products_match_torch(world: World, tmp_path: Path) -> None:
    config = Qwen3Config(**SHAPES["qwen3_4b"].settings | SMALL | {"intermediate_size": 128})
    recipe = make_recipe(arguments(["--seq", "64", "--checkpointing", "none"]), on_cpu=True)
    first: dict[str, float] = {}
    step, model = ours(recipe, config, 1, world, tmp_path, first, {})
    with FlopCounterMode(display=False) as counter:
        step()
    assert first["grad_norm"] > 0
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    head_of_last_token = 6 * 256 * 64  # it predicts nothing
    assert matrix_flops(model, config) * 64 == counted + head_of_last_token


@pytest.mark.parametrize("length", [8, 40])
def test_attention_flops_count_visible_keys(length: int) -> None:
    sizes = {"index_topk": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "index_n_heads": 3, "index_head_dim": 8}
    config = SHAPES["glm5"].config(**SHAPES["glm5"].settings | SMALL | sizes)
    seen = [query + 1 for query in range(length)]
    attended = sum(min(keys, 16) for keys in seen) * (2 * 32 + 16)
    scored = sum(seen) * 3 * 8
    flops = 2 * (3 * 2 * 4 * attended + 2 * scored)  # layers, heads; the indexer has no backward pass
    assert attention_flops(config, length, causal=True) * length == pytest.approx(flops)
    config = Qwen3Config(**SMALL)
    assert attention_flops(config, length, causal=True) * length == 3 * 2 * 2 * 4 * 2 * 32 * sum(seen)


def test_attention_flops_count_windows_and_two_head_sizes() -> None:
    config = SHAPES["gpt_oss_120b"].build(2, 4, 256)
    width = 3 * 2 * 64 * 2 * 64
    assert attention_flops(config, 8, causal=True) == 2 * width * 4.5, "no window is as long"
    seen = [min(token + 1, 128) for token in range(1024)]
    assert attention_flops(config, 1024, causal=True) == width * (512.5 + sum(seen) / 1024)
    assert attention_flops(config, 1024, causal=False) == width * (1024 + 128)
    config = SHAPES["deepseek_v3"].build(1, 4, 256)
    assert attention_flops(config, 8, causal=False) == 3 * 2 * 128 * (192 + 128) * 8


@pytest.mark.parametrize("name", SHAPES)
def test_benchmark_shapes_have_trainer_code(name: str) -> None:
    config = SHAPES[name].build(1, None if name in ("qwen3_4b", "llama3_8b") else 16, 256)
    assert family_of(config.model_type) is not None
    assert expert_count(config) == (0 if name in ("qwen3_4b", "llama3_8b") else 16)
