"""A tiny Hugging Face config of every family, as large as its features need and no larger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

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
)


def write(case: Case, directory: Path) -> Path:
    """A random checkpoint of a case, with every parameter away from its initial value, biases and norms included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(case.config(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return directory
