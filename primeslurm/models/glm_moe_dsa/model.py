"""GLM-5: DeepSeek-V3's layers with sparse attention. Some layers share the indexer of an earlier layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.models.deepseek_v3 import DeepSeekV3Model
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.models.deepseek_v3.model import LATENT_EPS, layers
from primeslurm.nn.layers.common import embedding_and_head, linear, model_spec, refuse
from primeslurm.nn.layers.parallelize import parallelize
from primeslurm.nn.layers.sparse_attention import Context, Indexer, sparse


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    refuse(
        hf,
        indexer_types="beginning with a shared one" if hf.indexer_types[0] != "full" else "",
        indexer_rope_interleave="" if getattr(hf, "indexer_rope_interleave", True) else "false",
    )
    return sparse_spec("glm_moe_dsa", hf, seq_len, attention, hf.indexer_types, interleaved=True)


def sparse_spec(
    name: str, hf: Any, seq_len: int, attention: str, indexer_types: Sequence[str], interleaved: bool
) -> ModelSpec:
    """Return the torchtitan spec of a model with sparse latent attention.

    Each layer's indexer type is "full", or "shared" with the last full one before it. `interleaved` indexers rotate
    neighboring values together.
    """
    refuse(hf, q_lora_rank="" if hf.q_lora_rank else "none")
    sparse_layers = layers(hf, seq_len, attention)
    owner = 0
    for index, layer in enumerate(sparse_layers):
        full = indexer_types[index] == "full"
        owner = index if full else owner
        layer.attention = sparse(
            layer.attention,
            indexer=_indexer(hf, interleaved) if full else None,
            selected_by=owner,
            shared=full and "shared" in indexer_types[index + 1 : index + 2],
            dense=seq_len <= hf.index_topk,
        )
    model = SparseModel.Config(**embedding_and_head(hf), layers=sparse_layers)
    return model_spec(hf, name, model, SparseStateDictAdapter, parallelize, pipeline_llm)


def _indexer(hf: Any, interleaved: bool) -> Indexer.Config:
    return Indexer.Config(
        heads=hf.index_n_heads,
        head_dim=hf.index_head_dim,
        rope_dim=hf.qk_rope_head_dim,
        interleaved=interleaved,
        top_k=hf.index_topk,
        wq_b=linear(hf.q_lora_rank, hf.index_n_heads * hf.index_head_dim),
        wk=linear(hf.hidden_size, hf.index_head_dim),
        k_norm=LayerNorm.Config(normalized_shape=hf.index_head_dim, eps=LATENT_EPS),
        weights_proj=linear(hf.hidden_size, hf.index_n_heads),
    )


class SparseModel(DeepSeekV3Model):
    """DeepSeek-V3's decoder that passes layers a `sparse_attention.Context` in place of attention masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3Model.Config):
        def update_from_config(self, *, config: Any, **arguments: Any) -> None:
            DeepSeekV3Model.Config.update_from_config(self, config=config, **arguments)
            for layer in self.layers:
                # torchtitan's sharding is for attention that takes query, key and value.
                layer.attention.inner_attention.sharding_config = None

    def get_attention_masks(self, positions: torch.Tensor) -> Context:
        """Return which keys each query of packed rows may see."""
        return Context.of(positions)


class SparseStateDictAdapter(DeepSeekV3StateDictAdapter):
    """State dict adapter: DeepSeek-V3's checkpoint names, and those of indexers."""

    def __init__(self, model_config: SparseModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
            hf_name = f"model.layers.{{}}.self_attn.indexer.{name}"
            self.from_hf_map[hf_name] = f"layers.{{}}.attention.indexer.{name}"
