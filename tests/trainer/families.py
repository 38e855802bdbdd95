"""A tiny Hugging Face config of every family, as large as its features need and no larger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LagunaConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from primeslurm.trainer import tiny

COMMON: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    # large enough for attention and routing to matter
    "initializer_range": 0.1,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Case:
    """One config of a family."""

    name: str
    config: Callable[[], Any]
    tolerance: float = 5e-5
    """Largest difference of logits to transformers, in float32."""


CASES = (
    Case("qwen3", lambda: Qwen3Config(**COMMON)),
    Case("qwen3-tied", lambda: Qwen3Config(**COMMON | {"tie_word_embeddings": True})),
    Case("qwen3_moe", lambda: Qwen3MoeConfig(**COMMON, **EXPERTS, norm_topk_prob=True)),
    Case(
        "llama",
        lambda: LlamaConfig(**COMMON, attention_bias=True, rope_parameters=LLAMA3),
    ),
    Case("llama-tied", lambda: LlamaConfig(**COMMON | {"tie_word_embeddings": True})),
    Case(
        "glm4_moe",
        lambda: Glm4MoeConfig(
            **COMMON,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
        ),
    ),
    Case(
        "minimax_m2",
        lambda: MiniMaxM2Config(
            **COMMON,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
    ),
    Case(
        "afmoe",
        lambda: AfmoeConfig(
            **COMMON | {"num_hidden_layers": 3},
            **EXPERTS,
            num_dense_layers=1,
            num_shared_experts=1,
            global_attn_every_n_layers=3,
            sliding_window=7,
            mup_enabled=True,
            route_scale=2.0,
        ),
    ),
    Case(
        "laguna",
        lambda: LagunaConfig(
            **COMMON,
            **EXPERTS,
            shared_expert_intermediate_size=48,
            layer_types=["full_attention", "sliding_attention"],
            num_attention_heads_per_layer=[4, 2],
            sliding_window=7,
            moe_routed_scaling_factor=2.0,
        ),
    ),
)

GENERIC_CASES = (
    # a window, in all layers and in some; experts, stored one by one under other names; tied heads
    Case("mistral", lambda: MistralConfig(**COMMON, sliding_window=7)),
    Case(
        "qwen2",
        lambda: Qwen2Config(
            **COMMON | {"tie_word_embeddings": True}, use_sliding_window=True, sliding_window=7, max_window_layers=1
        ),
    ),
    Case("mixtral", lambda: MixtralConfig(**COMMON, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)),
)
"""Families that only transformers has an implementation of."""


def write(case: Case, directory: Path) -> Path:
    """A random checkpoint of a case, with every tensor away from its initial value, biases and norms included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(case.config(), dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor) * 0.02)
    model.save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return directory
