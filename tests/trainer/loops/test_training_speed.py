"""The benchmark of training steps at a tiny size, and the MFU of its recorded results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training_models import SHAPES, expert_count
from benchmarks.training_speed import arguments, document_lengths, flops_per_token, measure
from primeslurm.models import family_of
from primeslurm.models.hf_config import shape_of
from primeslurm.plan.estimates.parameters import count
from primeslurm.trainer.distributed.world import World

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PEAK = 989e12  # of H100 and H200 in bfloat16


@pytest.mark.campaign
def test_both_steps_are_timed(world: World) -> None:
    options = ["--layers", "1", "--seq", "64", "--rows", "2", "--steps", "1", "--lm-head-chunk", "64", "--vocab", "256"]
    actual = measure(arguments([*options, "--against", "torchtitan"]), world)
    assert actual["tokens_per_step"] == 128 and actual["speed_ratio"] > 0
    assert actual["ours"]["tokens_per_s"] > 0 and actual["torchtitan"]["tokens_per_s"] > 0


@pytest.mark.campaign
def test_compiled_and_eager_steps_are_timed(world: World) -> None:
    options = ["--layers", "1", "--seq", "64", "--documents", "3", "--steps", "1", "--vocab", "256"]
    actual = measure(arguments([*options, "--against", "eager"]), world)
    assert actual["speed_ratio"] > 0
    assert actual["first_step"] == actual["eager_first_step"], "the same weights and rows"
    lengths = document_lengths(64, 1, 3)
    assert sum(lengths) == 8 * 64 and len(lengths) == sum((1, 1, 1, 1, 2, 2, 2, 3))
    shape = shape_of(SHAPES["tiny"].build(1, None, 256).to_dict())
    visible, whole = flops_per_token(shape, lengths, 64)
    assert actual["flops_per_token"] == visible < whole, "no key of another document is counted"


def test_features_that_torchtitan_lacks_are_rejected(world: World) -> None:
    with pytest.raises(SystemExit, match="it has Qwen3's shapes"):
        measure(arguments(["--shape", "glm5", "--against", "torchtitan"]), world)


@pytest.mark.parametrize("name", SHAPES)
def test_benchmark_shapes_have_trainer_code(name: str) -> None:
    config = SHAPES[name].build(1, None if name in ("qwen3_4b", "llama3_8b") else 16, 256)
    assert family_of(config.model_type) is not None
    assert expert_count(config) == (0 if name in ("qwen3_4b", "llama3_8b") else 16)


def recorded(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the results of this benchmark in the content of a results file."""
    if isinstance(value, dict) and {"flops_per_token", "shape"} <= set(value):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from recorded(part)


def adapters_of(result: dict[str, Any], shape: Any) -> int | None:
    """Return the weights of LoRA adapters that a token meets, from the number of parameters."""
    if not result["lora"]:
        return None
    adapters = result["parameters"] - count(shape).total
    e = shape.experts
    of_experts = shape.moe_layers * e.count * 3 * result["lora"] * (shape.hidden + e.width)
    return adapters - of_experts + of_experts * e.top_k // e.count


@pytest.mark.parametrize("file", sorted(path.name for path in RESULTS.glob("*_h[12]00*.json")))
def test_recorded_mfu_is_that_of_the_formula(file: str) -> None:
    for result in recorded(json.loads((RESULTS / file).read_text())):
        config = SHAPES[result["shape"]].build(result["layers"], result["experts"], result["vocab"])
        shape = shape_of(config.to_dict())
        lengths = document_lengths(result["seq"], result["rows"], result.get("documents") or 1)
        adapters = adapters_of(result | {"lora": result.get("lora")}, shape)
        operations, everything = flops_per_token(shape, lengths, result["seq"], adapters)
        # Earlier results counted short convolutions, too, and the logits of a document's last token.
        assert result["flops_per_token"] == pytest.approx(operations, rel=1e-3)
        for name in {"ours", "torchtitan", "eager"} & set(result):
            rate = result[name]["tokens_per_s"] / result["ranks"] / PEAK
            assert result[name]["mfu"] == pytest.approx(operations * rate, rel=2e-3, abs=1e-4), name
            assert result[name]["mfu_all_keys"] == pytest.approx(everything * rate, rel=2e-3, abs=1e-4), name
