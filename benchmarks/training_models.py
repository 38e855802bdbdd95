"""Shapes of the models whose training is timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)


@dataclass(frozen=True)
class Shape:
    """A model of full width. Its numbers of layers, experts and tokens of the vocabulary depend on the memory."""

    config: type
    settings: dict[str, Any]
    flavor: str | None
    """torchtitan's name of the same shape; None if it has none."""

    def build(self, layers: int, experts: int | None, vocabulary: int | None) -> Any:
        """Return the transformers config with this many layers, and the model's own numbers unless given."""
        counts: dict[str, Any] = {"num_hidden_layers": layers}
        if self.config is NemotronHConfig:
            counts = {"layers_block_type": [_NEMOTRON_KINDS[at % len(_NEMOTRON_KINDS)] for at in range(layers)]}
        if experts is not None:
            counts[_EXPERT_COUNTS.get(self.config, "num_experts")] = experts
        if vocabulary is not None:
            counts["vocab_size"] = vocabulary
        return self.config(**self.settings | counts)


_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "max_position_embeddings": 262144,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
_EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_EXPERT_COUNTS: dict[type, str] = {
    DeepseekV3Config: "n_routed_experts",
    Glm4MoeConfig: "n_routed_experts",
    GlmMoeDsaConfig: "num_local_experts",
    GptOssConfig: "num_local_experts",
    MiniMaxM2Config: "num_local_experts",
    NemotronHConfig: "n_routed_experts",
}
# The first layers of Nemotron-3-Nano.
_NEMOTRON_KINDS = ("linear_attention", "moe", "linear_attention", "moe", "linear_attention", "full_attention", "moe")
SHAPES = {
    "qwen3_30b_a3b": Shape(
        Qwen3MoeConfig,
        _QWEN3 | _EXPERTS | {"hidden_size": 2048, "num_key_value_heads": 4, "num_experts": 128},
        "30B-A3B",
    ),
    "qwen3_4b": Shape(
        Qwen3Config,
        _QWEN3
        | {"hidden_size": 2560, "num_key_value_heads": 8, "intermediate_size": 9728, "tie_word_embeddings": True},
        "4B",
    ),
    "llama3_8b": Shape(
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
        },
        None,
    ),
    # transformers' defaults are GLM-4.5-Air's, DeepSeek-V3's, gpt-oss-120b's, MiniMax-M2's and GLM-5's. All layers have
    # experts, as all but 1 to 3 layers of the whole models do.
    "glm4_5_air": Shape(Glm4MoeConfig, {"first_k_dense_replace": 0, "head_dim": 128}, None),
    # DeepSeek-V3 and MiniMax-M2 have fields of released configs that vLLM needs and transformers does not know.
    "deepseek_v3": Shape(
        DeepseekV3Config,
        {"first_k_dense_replace": 0, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        None,
    ),
    "gpt_oss_120b": Shape(GptOssConfig, {}, None),
    "minimax_m2": Shape(MiniMaxM2Config, {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True}, None),
    "glm5": Shape(GlmMoeDsaConfig, {"first_k_dense_replace": 0}, None),
    # Qwen3.5-35B-A3B: three of four layers are gated delta nets.
    "qwen3_5": Shape(
        Qwen3_5MoeTextConfig,
        {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
        },
        None,
    ),
    # Nemotron-3-Nano-30B-A3B: a layer is a Mamba-2 layer, experts or attention.
    "nemotron_h": Shape(
        NemotronHConfig,
        {
            "vocab_size": 131072,
            "hidden_size": 2688,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "chunk_size": 128,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": False,
        },
        None,
    ),
    "tiny": Shape(
        Qwen3MoeConfig,
        _QWEN3
        | _EXPERTS
        | {
            "vocab_size": 2048,
            "hidden_size": 256,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_experts": 64,
        },
        "debugmodel_moe",
    ),
}


def expert_count(config: Any) -> int:
    """Return the number of routed experts per layer; 0 if there are none."""
    return getattr(config, _EXPERT_COUNTS.get(type(config), "num_experts"), 0)
