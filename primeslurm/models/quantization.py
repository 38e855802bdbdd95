"""Formats of quantized checkpoints, read from the `quantization_config` of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from primeslurm.nn.block_sizes import FP8_BLOCK


def storage_format(config: Mapping[str, Any]) -> str | None:
    """Return the format of a checkpoint's weights (fp8, mxfp4, int4, ...), or None if they are not quantized."""
    if not config:
        return None
    method = str(config.get("quant_method", ""))
    if method in ("fp8", "mxfp4"):
        return method
    weights = _compressed_tensors(config)
    if weights is None:  # GPTQ, AWQ and the like
        return f"int{config.get('bits', 4)}"
    return f"{weights.get('type', 'int')}{weights.get('num_bits', 4)}"


def is_block_fp8(config: Mapping[str, Any]) -> bool:
    """Return whether weights are stored in E4M3 with one scale per block of 128 x 128."""
    fp8 = config.get("quant_method") == "fp8" and config.get("fmt", "e4m3") == "e4m3"
    return fp8 and config.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK]


def four_bit_format(config: Mapping[str, Any]) -> Literal["int4", "mxfp4"] | None:
    """Return the four-bit format of a checkpoint if the trainer can read it, else None.

    "mxfp4" is the format of gpt-oss: stacks of experts in E2M1, with an E8M0 scale for every 32 values of a row. "int4"
    is the format of Kimi-K2-Thinking: symmetric `pack-quantized` of compressed-tensors, with a scale per group of
    columns or per row.
    """
    if config.get("quant_method") == "mxfp4":
        return "mxfp4"
    weights = _compressed_tensors(config)
    if weights is None or config.get("format") != "pack-quantized" or len(config.get("config_groups", {})) != 1:
        return None
    readable = (
        weights.get("type", "int") == "int"
        and weights.get("num_bits") == 4
        and weights.get("symmetric", True)
        and weights.get("strategy") in ("group", "channel")
        and weights.get("actorder") in (None, "weight", "static")
    )
    return "int4" if readable else None


def _compressed_tensors(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the settings of compressed-tensors for the weights of the first group of layers."""
    if config.get("quant_method") != "compressed-tensors":
        return None
    groups: Mapping[str, Any] = config.get("config_groups") or {}
    first: Mapping[str, Any] = next(iter(groups.values()), {})
    return first.get("weights") or {"num_bits": config.get("bits", 4)}
