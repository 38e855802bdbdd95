"""What the families' builders share."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common import Embedding, FeedForward, Linear
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.nn_modules import RMSNorm

# Weights always come from a checkpoint, but torchtitan wants an initialiser for every parameter.
MATRIX = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
NORM = {"weight": nn.init.ones_}
EXPERTS = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), MATRIX["weight"])


def norm(hf: Any, dim: int) -> RMSNorm.Config:
    """Make an RMSNorm over `dim` values with the model's epsilon."""
    eps = hf.layer_norm_epsilon if hasattr(hf, "layer_norm_epsilon") else hf.rms_norm_eps
    return RMSNorm.Config(normalized_shape=dim, eps=eps, param_init=NORM)


def linear(inputs: int, outputs: int, bias: bool = False) -> Linear.Config:
    """Make the config of a linear layer."""
    return Linear.Config(in_features=inputs, out_features=outputs, bias=bias, param_init=MATRIX)


def ffn(hf: Any, width: int) -> FeedForward.Config:
    """Make the config of a SwiGLU feed-forward network with this intermediate size."""
    return make_ffn_config(dim=hf.hidden_size, hidden_dim=width, w1_param_init=MATRIX, w2w3_param_init=MATRIX)


def build_parts(module: nn.Module, config: Any, *names: str) -> None:
    """Build configs as parts of a module, under their own names; where one is None, so is the part."""
    for name in names:
        part = getattr(config, name)
        setattr(module, name, None if part is None else part.build())


def ends(hf: Any) -> dict[str, Any]:
    """Return what every decoder config has before and after its layers: embedding, final norm, head, tying."""
    return {
        "dim": hf.hidden_size,
        "vocab_size": hf.vocab_size,
        "norm": norm(hf, hf.hidden_size),
        "tok_embeddings": Embedding.Config(
            num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size, param_init=MATRIX
        ),
        "lm_head": Linear.Config(in_features=hf.hidden_size, out_features=hf.vocab_size, param_init=MATRIX),
        "enable_weight_tying": hf.tie_word_embeddings,
    }


def refuse(hf: Any, **features: object) -> None:
    """Raise ValueError for the first of a config's features, by name, that has a value and is not implemented."""
    for name, value in features.items():
        if value:
            raise ValueError(f"{name} {value} is not supported for {hf.model_type}")


def silu_only(hf: Any) -> dict[str, str]:
    """Return what to `refuse` of a config whose feed-forward networks are built as SwiGLU."""
    return {"activation": "" if hf.hidden_act == "silu" else hf.hidden_act}
