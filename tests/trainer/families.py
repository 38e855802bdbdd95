"""A tiny config of transformers for every family, just large enough for its features."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4Config,
    Glm4MoeConfig,
    Glm4vConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LagunaConfig,
    LlamaConfig,
    LlavaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from benchmarks.support.draft_layers import write_checkpoint
from scripts.models import tiny_model

COMMON: dict[str, Any] = {
    "vocab_size": tiny_model.VOCABULARY,
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
    # Large enough that attention and routing affect the logits.
    "initializer_range": 0.1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
QWEN3_5: dict[str, Any] = {
    **COMMON,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
IMAGES: dict[str, Any] = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
QWEN3_VL: dict[str, Any] = COMMON | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
DEEPSTACK: dict[str, Any] = VISION | {"depth": 2, "deepstack_visual_indexes": [1, 0]}
NEMOTRON: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA: dict[str, Any] = COMMON | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # transformers sizes the rotary embeddings by it
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
MLA_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
# With few index heads, many keys have a score of exactly zero, and the selection among them is arbitrary.
DSA: dict[str, Any] = MLA | {"num_hidden_layers": 4, "rms_norm_eps": 1e-5, "index_n_heads": 32, "index_head_dim": 16}
SHARED: list[str] = ["full", "shared", "shared", "full"]

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
    """A config to compare with transformers."""

    name: str
    config: Callable[[], Any]
    tolerance: float = 5e-5
    """Largest difference of logits in float32."""


def case(name: str, config: Callable[..., Any], *fields: dict[str, Any], **more: Any) -> Case:
    """Return a case with these fields of the config. Later ones override earlier ones."""
    merged = {key: value for part in (*fields, more) for key, value in part.items()}
    return Case(name, lambda: config(**copy.deepcopy(merged)))


def vision_case(name: str, config: Callable[..., Any], text: dict[str, Any], vision: dict[str, Any]) -> Case:
    return case(name, config, IMAGES, text_config=text, vision_config=vision)


LATENT_NEMOTRON = {"moe_latent_size": 16, "n_group": 4, "topk_group": 2}
SHARED_EXPERT = {"shared_expert_intermediate_size": 48}
TIED = {"tie_word_embeddings": True}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
PLAIN_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GLM4_MOE = GROUPS | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}
AFMOE = EXPERTS | {"num_hidden_layers": 3, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 7}
LAGUNA = EXPERTS | SHARED_EXPERT | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}

CASES = (
    # The window is shorter than either document.
    case("gpt_oss", GptOssConfig, COMMON, LOCAL_EXPERTS, sliding_window=16, rope_parameters=YARN),
    case("nemotron_h", NemotronHConfig, NEMOTRON),
    case("nemotron_h-latent", NemotronHConfig, NEMOTRON, LATENT_NEMOTRON),
    case("qwen3_5_text", Qwen3_5TextConfig, QWEN3_5),
    case("qwen3_5_moe_text", Qwen3_5MoeTextConfig, QWEN3_5, EXPERTS, SHARED_EXPERT),
    vision_case("qwen3_5", Qwen3_5Config, QWEN3_5, VISION),
    vision_case("qwen3_5_moe", Qwen3_5MoeConfig, QWEN3_5 | EXPERTS | SHARED_EXPERT, VISION),
    case("qwen3", Qwen3Config, COMMON),
    case("qwen3-yarn", Qwen3Config, COMMON, rope_parameters=PLAIN_YARN),
    case("qwen3-tied", Qwen3Config, COMMON, TIED),
    case("qwen3_moe", Qwen3MoeConfig, COMMON, EXPERTS, norm_topk_prob=True),
    vision_case("qwen3_vl", Qwen3VLConfig, QWEN3_VL, DEEPSTACK),
    # No expert is square: transformers infers their orientation from their shape.
    vision_case("qwen3_vl_moe", Qwen3VLMoeConfig, QWEN3_VL | EXPERTS | {"moe_intermediate_size": 24}, DEEPSTACK),
    case("llama", LlamaConfig, COMMON, attention_bias=True, rope_parameters=LLAMA3),
    case("llama-tied", LlamaConfig, COMMON, TIED),
    case("glm4", Glm4Config, COMMON, attention_bias=True),
    case("glm4_moe", Glm4MoeConfig, COMMON, GLM4_MOE, routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True),
    case("minimax_m2", MiniMaxM2Config, COMMON, LOCAL_EXPERTS, rope_parameters=PARTIAL_ROPE),
    case("afmoe", AfmoeConfig, COMMON, AFMOE, global_attn_every_n_layers=3, mup_enabled=True, route_scale=2.0),
    case("laguna", LagunaConfig, COMMON, LAGUNA, num_attention_heads_per_layer=[4, 2], moe_routed_scaling_factor=2.0),
    case("deepseek_v3", DeepseekV3Config, MLA, GROUPS, rope_parameters=MLA_YARN),
    case("deepseek_v3-plain", DeepseekV3Config, MLA, ONE_GROUP, q_lora_rank=None),
    case("deepseek_v32", DeepseekV32Config, DSA, GROUPS, index_topk=16, rope_parameters=MLA_YARN),
    case("deepseek_v32-short", DeepseekV32Config, DSA, ONE_GROUP, index_topk=64),
    case("glm_moe_dsa", GlmMoeDsaConfig, DSA, index_topk=16, indexer_types=SHARED),
    case("glm_moe_dsa-short", GlmMoeDsaConfig, DSA, index_topk=64),
)

SIX: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
UNEVEN_CASES = (
    # 4 ranks cannot share 6 experts evenly, nor 2 ranks 3 of them: FSDP splits another dimension.
    case("qwen3_moe-uneven", Qwen3MoeConfig, COMMON, SIX, norm_topk_prob=True),
    case("deepseek_v3-uneven", DeepseekV3Config, MLA, ONE_GROUP, n_routed_experts=6),
    case("gpt_oss-uneven", GptOssConfig, COMMON, num_local_experts=6, num_experts_per_tok=2, rope_parameters=YARN),
    vision_case("qwen3_vl_moe-uneven", Qwen3VLMoeConfig, QWEN3_VL | SIX, DEEPSTACK),
)

QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
GENERIC_CASES = (
    # A window in all layers and in some; experts stored one by one under other names; tied heads.
    case("mistral", MistralConfig, COMMON, sliding_window=7),
    case("qwen2", Qwen2Config, COMMON, TIED, QWEN2_WINDOW),
    case("mixtral", MixtralConfig, COMMON, LOCAL_EXPERTS, sliding_window=None),
)
"""Models without a family."""
_MROPE: dict[str, Any] = COMMON | {
    "head_dim": 8,  # these compute it from hidden_size anyway
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
_ENCODER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
_CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
VISION_CASES = (
    vision_case("glm4v", Glm4vConfig, _MROPE, _ENCODER | {"image_size": 16}),
    vision_case("qwen2_vl", Qwen2VLConfig, _MROPE, _ENCODER | {"embed_dim": 32}),
    vision_case("qwen2_5_vl", Qwen2_5_VLConfig, _MROPE, _ENCODER | {"window_size": 16, "fullatt_block_indexes": [0]}),
)
"""Models with a vision encoder and without a family."""
OTHER_VISION_CASE = case("llava", LlavaConfig, text_config=Qwen2Config(**COMMON).to_dict(), vision_config=_CLIP)
"""Its vision encoder is not supported, so it is trained on text."""
TIED_QWEN = case("qwen3_5_text-tied", Qwen3_5TextConfig, QWEN3_5, TIED)
"""The head of small Qwen3.5 models."""

_ALONE = (OTHER_VISION_CASE, TIED_QWEN)
BY_NAME = {each.name: each for each in (*CASES, *UNEVEN_CASES, *GENERIC_CASES, *VISION_CASES, *_ALONE)}


def reference_of(case: Case) -> Any:
    """Return the class of transformers that loads a case's checkpoint."""
    return AutoModelForImageTextToText if hasattr(case.config(), "vision_config") else AutoModelForCausalLM


def write(case: Case, directory: Path) -> Path:
    """Write a checkpoint in which every tensor, including biases and norms, differs from its initial value."""
    torch.manual_seed(0)
    model = reference_of(case).from_config(case.config(), dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor) * 0.02)
    model.save_pretrained(directory)
    if case.name.startswith("qwen3_vl_moe"):
        _transpose_experts(directory / "model.safetensors")
    tiny_model.tokenizer().save_pretrained(directory)
    return directory


def with_layers(case: Case, layers: int) -> Any:
    """Return a case's config with this number of layers, and one draft layer."""
    config = case.config()
    text = config.get_text_config()
    text.num_hidden_layers = layers
    setattr(text, "mtp_num_hidden_layers" if case.name.startswith("qwen") else "num_nextn_predict_layers", 1)
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [*kinds, "full_attention"][:layers]
    if kinds := getattr(text, "mlp_layer_types", None):
        text.mlp_layer_types = kinds[:layers]
    if getattr(text, "indexer_types", None):
        text.indexer_types = ["full"] * layers
    return config


def write_drafting(case: Case, directory: Path, layers: int = 2) -> Path:
    """Write a checkpoint with one draft layer. All norms differ from their initial value."""
    write_checkpoint(directory, lambda count: with_layers(case, count), layers, "float32")
    for file in directory.glob("*.safetensors"):
        noisy = {name: t + 0.1 * torch.randn_like(t) if "norm" in name else t for name, t in load_file(file).items()}
        if case.name.startswith("qwen"):
            noisy = {_qwen_name(name, layers): tensor for name, tensor in noisy.items()}
            for copy_of_model in ("embed_tokens", "shared_head.head"):
                noisy.pop(f"mtp.layers.0.{copy_of_model}.weight", None)
        save_file(noisy, file, metadata={"format": "pt"})
    tiny_model.tokenizer().save_pretrained(directory)
    return directory


_QWEN_NAMES = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


def _qwen_name(name: str, layers: int) -> str:
    """Return the name of a tensor in Qwen3.5's format."""
    match = re.fullmatch(rf"model\.(?:language_model\.)?layers\.{layers}\.(.+?)(\.weight)?", name)
    if match is None:
        return name
    return f"mtp.{_QWEN_NAMES.get(match[1], f'layers.0.{match[1]}')}{match[2] or ''}"


def _transpose_experts(file: Path) -> None:
    # Released checkpoints have the other orientation than those that transformers writes.
    tensors = load_file(file)
    stacks = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file(tensors | stacks, file, metadata={"format": "pt"})
