"""What builds Maple in the trainer: a function `spec`, and the config that transformers lacks."""

from typing import Any

from torchtitan.protocols.model_spec import ModelSpec
from transformers import AutoConfig, Qwen3Config

from primeslurm.models.qwen3 import model


class MapleConfig(Qwen3Config):
    """Qwen3's."""

    model_type = "maple"


AutoConfig.register(MapleConfig.model_type, MapleConfig)


def spec(hf: Any, seq_len: int, attention: str) -> ModelSpec:
    """The torchtitan spec of a Maple config.

    Args:
        hf: the config, as transformers reads it.
        seq_len: longest sequence.
        attention: "flex" or "varlen".
    """
    return model.spec(hf, seq_len, attention)
