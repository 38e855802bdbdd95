"""The shape of a model, read from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primeslurm.models.family import Traits
from primeslurm.models.quantization import four_bit_format, is_block_fp8, storage_format
from primeslurm.models.registry import family_of
from primeslurm.models.shape import DeltaNets, ExpertShape, IndexerShape, Mamba, Mla, ModelShape, Vision

# Families name the number of their draft layers differently.
DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape of a decoder from the content of its config.json.

    Raises:
        KeyError: A field is missing. A damaged config may also raise TypeError, ValueError, AttributeError or
            ArithmeticError.
    """
    # Models with a vision encoder nest the config of their language model.
    text = config.get("text_config") or config
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    expert_layers = _expert_layers(text)
    layers = _layer_counts(text, len(expert_layers))
    family = family_of(text["model_type"]) or family_of(config["model_type"])
    traits = family.traits if family else Traits()
    return ModelShape(
        model_type=config["model_type"],
        hidden=hidden,
        vocab=text["vocab_size"],
        max_positions=text.get("max_position_embeddings"),
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        attention_layers=layers["attention"],
        window=text.get("sliding_window"),
        window_layers=list(text.get("layer_types") or ()).count("sliding_attention"),
        dense_layers=layers["dense"],
        dense_width=text.get("intermediate_size", 0),
        expert_layers=expert_layers,
        experts=_experts(text) if expert_layers else None,
        gated=text.get("mlp_hidden_act") != "relu2",
        attention_gate=_attention_gate(text, traits),
        attention_bias=bool(text.get("attention_bias")),
        qk_norm=traits.qk_norm or bool(text.get("use_qk_norm")),
        post_norms=traits.post_norms,
        output_bias=traits.output_bias,
        expert_bias=traits.expert_bias,
        sinks=traits.sinks,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings"))),
        mla=_mla(text),
        indexer=_indexer(text, layers["attention"]),
        mamba=_mamba(text, layers["mamba"]) if layers["mamba"] else None,
        delta_nets=_delta_nets(text),
        vision=_vision(config),
        has_vision=bool(config.get("vision_config")),
        quantization=storage_format(quantization),
        fp8_blocks=is_block_fp8(quantization),
        four_bits=four_bit_format(quantization),
        fp8_powers=quantization.get("scale_fmt") == "ue8m0",
        heads_by_window=_heads_by_window(text),
        draft_layers=next((int(text[name]) for name in DRAFT_LAYERS if text.get(name) is not None), None),
    )


def _indexer(text: Mapping[str, Any], layers: int) -> IndexerShape | None:
    if "index_n_heads" not in text:
        return None
    types = text.get("indexer_types")
    with_indexer = list(types).count("full") if types else layers
    return IndexerShape(text["index_n_heads"], text["index_head_dim"], text.get("index_topk", 2048), with_indexer)


def _attention_gate(text: Mapping[str, Any], traits: Traits) -> int:
    # Laguna chooses by its field `gating`; the other families have one kind of gate.
    heads = text["num_attention_heads"]
    if traits.attention_gate == "element" or text.get("gating") == "per-element":
        return int(heads * text["head_dim"])
    return int(heads) if traits.attention_gate == "head" else 0


def _heads_by_window(text: Mapping[str, Any]) -> tuple[int, int] | None:
    by_layer = text.get("num_attention_heads_per_layer")
    if not by_layer:
        return None
    types = text.get("layer_types") or ["full_attention"] * len(by_layer)
    windowed = sum(heads for heads, kind in zip(by_layer, types, strict=True) if kind == "sliding_attention")
    return sum(by_layer) - windowed, windowed


def _layer_counts(text: Mapping[str, Any], moe: int) -> dict[str, int]:
    if blocks := _blocks(text):
        return {name: blocks.count(name) for name in ("attention", "dense", "mamba")}
    # A delta net replaces attention. Every layer has a feed-forward network or experts as well.
    layers = text["num_hidden_layers"]
    nets = _delta_nets(text)
    return {"attention": layers - (nets.layers if nets else 0), "dense": layers - moe, "mamba": 0}


def _expert_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    if blocks := _blocks(text):
        return tuple(index for index, block in enumerate(blocks) if block == "moe")
    if not _expert_count(text):
        return ()
    return tuple(index for index in range(text["num_hidden_layers"]) if _is_moe(text, index))


def _blocks(text: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer of a hybrid model, whose layers have one part each; empty for other models."""
    marks = text.get("hybrid_override_pattern") or text.get("layers_block_type") or ()
    return [_BLOCKS.get(mark, "") for mark in marks]


# The pattern string of Nemotron-H's config, and the list of types that transformers makes of it.
_BLOCKS = {
    **{"*": "attention", "E": "moe", "-": "dense", "M": "mamba"},
    **{"full_attention": "attention", "moe": "moe", "mlp": "dense", "linear_attention": "mamba"},
}


def _is_moe(text: Mapping[str, Any], index: int) -> bool:
    sparse_step = text.get("decoder_sparse_step", 1)
    if types := text.get("mlp_layer_types"):
        return bool(types[index] == "sparse")
    # The first layers are dense (DeepSeek, AFMoE), or listed ones, or all but every n-th (Qwen3).
    return (
        index >= (text.get("first_k_dense_replace") or text.get("num_dense_layers") or 0)
        and index not in (text.get("mlp_only_layers") or ())
        and (index + 1) % sparse_step == 0
    )


def _expert_count(text: Mapping[str, Any]) -> int:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(text[name]) for name in names if text.get(name)), 0)


def _experts(text: Mapping[str, Any]) -> ExpertShape:
    # Families name these fields differently, and give the shared width or a number of shared experts.
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = (
        text.get("moe_shared_expert_intermediate_size")
        or text.get("shared_expert_intermediate_size")
        or width * (text.get("n_shared_experts") or text.get("num_shared_experts") or 0)
    )
    return ExpertShape(_expert_count(text), text["num_experts_per_tok"], width, shared, text.get("moe_latent_size"))


def _mla(text: Mapping[str, Any]) -> Mla | None:
    if not text.get("kv_lora_rank"):
        return None
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Mla(*(int(text.get(name) or 0) for name in names))


def _mamba(text: Mapping[str, Any], layers: int) -> Mamba:
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    sizes = [int(text[name]) for name in names]
    return Mamba(layers, *(*sizes, int(text.get("chunk_size", 128))))


def _delta_nets(text: Mapping[str, Any]) -> DeltaNets | None:
    if "linear_num_key_heads" not in text:
        return None
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    layers = list(text["layer_types"]).count("linear_attention")
    return DeltaNets(layers, *(int(text[f"linear_{name}"]) for name in names))


def _vision(config: Mapping[str, Any]) -> Vision | None:
    encoder, family = config.get("vision_config"), family_of(config["model_type"])
    defaults = family.traits.vision if family else None
    if encoder is None or defaults is None:
        return None
    v = {name: int(encoder.get(name, default)) for name, default in defaults.sizes.items()}
    return Vision(
        depth=v["depth"],
        hidden=v["hidden_size"],
        width=v["intermediate_size"],
        patch_values=v["in_channels"] * v["temporal_patch_size"] * v["patch_size"] ** 2,
        patches=v["spatial_merge_size"] ** 2,
        positions=v["num_position_embeddings"],
        out=v["out_hidden_size"],
        outputs=1 + len(encoder.get("deepstack_visual_indexes", defaults.deepstack)),
    )
