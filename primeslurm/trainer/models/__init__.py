"""From a Hugging Face config to a torchtitan model: one module per family, found by `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.trainer.models import (
    afmoe,
    deepseek_v3,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    kimi_k25,
    laguna,
    llama,
    minimax_m2,
    nemotron_h,
    qwen3,
    qwen3_5,
    qwen3_vl,
)

Builder = Callable[[Any, int, str], ModelSpec]
FAMILIES: dict[str, Builder] = {
    "afmoe": afmoe.spec,
    "deepseek_v3": deepseek_v3.spec,
    "glm4_moe": glm4_moe.spec,
    "glm_moe_dsa": glm_moe_dsa.spec,
    "gpt_oss": gpt_oss.spec,
    "kimi_k2": deepseek_v3.spec,
    "kimi_k25": kimi_k25.spec,
    "laguna": laguna.spec,
    "llama": llama.spec,
    "minimax_m2": minimax_m2.spec,
    "nemotron_h": nemotron_h.spec,
    "qwen3": qwen3.spec,
    "qwen3_5": qwen3_5.spec,
    "qwen3_5_moe": qwen3_5.spec,
    "qwen3_5_moe_text": qwen3_5.spec,
    "qwen3_5_text": qwen3_5.spec,
    "qwen3_moe": qwen3.spec,
    "qwen3_vl": qwen3_vl.spec,
    "qwen3_vl_moe": qwen3_vl.spec,
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
