"""Maple in the trainer: the function `spec`, and the config that transformers lacks."""

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec
from transformers import AutoConfig, Qwen3Config

from primeslurm.models.qwen3 import model as qwen3


class MapleConfig(Qwen3Config):
    """The config of Qwen3 with another model type."""

    model_type = "maple"


AutoConfig.register(MapleConfig.model_type, MapleConfig)


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """Return the torchtitan spec of a config of transformers.

    Args:
        hf: The config.
        seq_len: Longest sequence [tokens].
        attention: "flex" or "varlen".
    """
    return qwen3.spec(hf, seq_len, attention)
