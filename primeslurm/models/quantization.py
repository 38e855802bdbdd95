"""How a checkpoint stores its weights, by the `quantization_config` of its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from primeslurm.nn.block_sizes import FP8_BLOCK


def storage(stored: Mapping[str, Any]) -> str | None:
    """Name what weights are stored in: fp8, mxfp4, int4 and the like; None for the model's dtype."""
    if not stored:
        return None
    method = str(stored.get("quant_method", ""))
    if method in ("fp8", "mxfp4"):
        return method
    weights = _compressed(stored)
    if weights is None:
        return f"int{stored.get('bits', 4)}"
    return f"{weights.get('type', 'int')}{weights.get('num_bits', 4)}"


def is_block_fp8(stored: Mapping[str, Any]) -> bool:
    """Whether weights are in E4M3 with one scale for each block of 128 x 128."""
    fp8 = stored.get("quant_method") == "fp8" and stored.get("fmt", "e4m3") == "e4m3"
    return fp8 and stored.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK]


def four_bit_format(stored: Mapping[str, Any]) -> Literal["int4", "mxfp4"] | None:
    """Name the format in four bits that the trainer reads; None for any other.

    `mxfp4` is that of gpt-oss: stacks of experts in E2M1, with a scale in E8M0 for 32 of a row. `int4` is
    pack-quantized of compressed-tensors, as Kimi-K2-Thinking has it: symmetric, with a scale for some columns of a row.
    """
    if stored.get("quant_method") == "mxfp4":
        return "mxfp4"
    weights = _compressed(stored)
    if weights is None or stored.get("format") != "pack-quantized" or len(stored.get("config_groups", {})) != 1:
        return None
    reads = (
        weights.get("type", "int") == "int"
        and weights.get("num_bits") == 4
        and weights.get("symmetric", True)
        and weights.get("strategy") in ("group", "channel")
        and weights.get("actorder") in (None, "weight", "static")
    )
    return "int4" if reads else None


def _compressed(stored: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What compressed-tensors says of the weights of its first group of layers."""
    if stored.get("quant_method") != "compressed-tensors":
        return None
    groups: Mapping[str, Any] = stored.get("config_groups") or {}
    first: Mapping[str, Any] = next(iter(groups.values()), {})
    return first.get("weights") or {"num_bits": stored.get("bits", 4)}
