"""From a Hugging Face config to a torchtitan model: one module per family, found by `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.trainer.models import afmoe, glm4_moe, laguna, llama, minimax_m2, qwen3

Builder = Callable[[Any, int, str], ModelSpec]
FAMILIES: dict[str, Builder] = {
    "llama": llama.spec,
    "qwen3": qwen3.spec,
    "qwen3_moe": qwen3.spec,
    "glm4_moe": glm4_moe.spec,
    "minimax_m2": minimax_m2.spec,
    "afmoe": afmoe.spec,
    "laguna": laguna.spec,
}


def is_generic(impl: str, hf_config: Any) -> bool:
    """Whether `model.impl` means the code of transformers for this config."""
    return impl == "hf" or (impl == "auto" and hf_config.model_type not in FAMILIES)


def spec(hf_config: Any, seq_len: int, attention: str) -> ModelSpec:
    """The torchtitan spec of a Hugging Face config.

    Args:
        hf_config: a transformers config.
        seq_len: longest sequence, which sizes the RoPE tables.
        attention: "flex" or "varlen".

    Raises:
        ValueError: the family, or a feature that the config asks for, is not supported.
    """
    if hf_config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"model type {hf_config.model_type} is not supported (supported: {known})")
    return FAMILIES[hf_config.model_type](hf_config, seq_len, attention)
