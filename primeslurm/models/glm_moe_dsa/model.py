"""GLM-5: DeepSeek-V3's layers with sparse attention, whose indexers some layers share.

DeepSeek-V3.2 is the same, but that each layer has its own, which rotates other values together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import Linear
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.models.deepseek_v3 import DeepSeekV3Model
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.models.deepseek_v3.model import LATENT_EPS, layers
from primeslurm.nn.layers.common import MATRIX, ends, refuse
from primeslurm.nn.layers.parallelize import parallelize
from primeslurm.nn.layers.sparse_attention import Context, Indexer, sparse


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """Make the torchtitan spec of a GLM-5 config. Raises ValueError for features that are not implemented."""
    refuse(
        hf,
        indexer_types="beginning with a shared one" if hf.indexer_types[0] != "full" else "",
        indexer_rope_interleave="" if getattr(hf, "indexer_rope_interleave", True) else "false",
    )
    return sparse_spec("glm_moe_dsa", hf, seq_len, attention, hf.indexer_types, interleaved=True)


def sparse_spec(
    name: str, hf: Any, seq_len: int, attention: str, indexer_types: Sequence[str], interleaved: bool
) -> ModelSpec:
    """Make the torchtitan spec of latent attention that is sparse.

    Args:
        name: of the family.
        hf: its config.
        seq_len: longest row of tokens.
        attention: of DeepSeek-V3's layers.
        indexer_types: of each layer: full, or shared with the last full one before.
        interleaved: indexers rotate neighbouring values together.

    Raises:
        ValueError: the config has features that are not implemented.
    """
    refuse(hf, q_lora_rank="" if hf.q_lora_rank else "none")
    built = layers(hf, seq_len, attention)
    owner = 0
    for index, layer in enumerate(built):
        own = indexer_types[index] == "full"
        owner = index if own else owner
        layer.attention = sparse(
            layer.attention,
            indexer=_indexer(hf, interleaved) if own else None,
            selected_by=owner,
            shared=own and "shared" in indexer_types[index + 1 : index + 2],
            dense=seq_len <= hf.index_topk,
        )
    return ModelSpec(
        name=name,
        flavor=hf.model_type,
        model=SparseModel.Config(**ends(hf), layers=built),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,  # as for DeepSeek-V3
        state_dict_adapter=SparseStateDictAdapter,
    )


def _indexer(hf: Any, interleaved: bool) -> Indexer.Config:
    def linear(inputs: int, outputs: int) -> Linear.Config:
        return Linear.Config(in_features=inputs, out_features=outputs, param_init=MATRIX)

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
    """DeepSeek-V3's decoder; in the place of attention masks goes what queries may see."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3Model.Config):
        """As DeepSeek-V3's."""

        def update_from_config(self, *, config: Any, **arguments: Any) -> None:
            """Fill in how parameters and activations are spread over ranks."""
            DeepSeekV3Model.Config.update_from_config(self, config=config, **arguments)
            for layer in self.layers:
                # made for attention that takes query, key and value
                layer.attention.inner_attention.sharding_config = None

    def get_attention_masks(self, positions: torch.Tensor) -> Context:
        """What each query of packed rows may see."""
        return Context.of(positions)


class SparseStateDictAdapter(DeepSeekV3StateDictAdapter):
    """DeepSeek-V3's names, and those of the indexers."""

    def __init__(self, model_config: SparseModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
            hf_name = f"model.layers.{{}}.self_attn.indexer.{name}"
            self.from_hf_map[hf_name] = f"layers.{{}}.attention.indexer.{name}"
