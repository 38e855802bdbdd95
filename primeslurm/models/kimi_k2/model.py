"""torchtitan model of Kimi-K2: DeepSeek-V3 under a model type that transformers does not know."""

from __future__ import annotations

from transformers import AutoConfig, DeepseekV3Config

from primeslurm.models.deepseek_v3.model import spec

__all__ = ["spec"]


class KimiK2Config(DeepseekV3Config):
    """The config of DeepSeek-V3 with another model type."""

    model_type = "kimi_k2"


AutoConfig.register(KimiK2Config.model_type, KimiK2Config)
