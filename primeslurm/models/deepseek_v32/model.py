"""torchtitan model of DeepSeek-V3.2: DeepSeek-V3 with sparse attention. Every layer has its own indexer."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.models.glm_moe_dsa.model import sparse_spec


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    return sparse_spec("deepseek_v32", hf, seq_len, attention, ["full"] * hf.num_hidden_layers, interleaved=False)
