"""Config helpers that the model modules of all families share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common import Embedding, FeedForward, Linear
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.model_spec import ModelSpec

# Weights always come from a checkpoint, but torchtitan requires an initializer for every parameter.
MATRIX = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
NORM = {"weight": nn.init.ones_}
EXPERTS = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), MATRIX["weight"])


def norm(hf: Any, dim: int) -> RMSNorm.Config:
    """Return an RMSNorm over `dim` values with the model's epsilon."""
    eps = hf.layer_norm_epsilon if hasattr(hf, "layer_norm_epsilon") else hf.rms_norm_eps
    return RMSNorm.Config(normalized_shape=dim, eps=eps, param_init=NORM)


def linear(inputs: int, outputs: int, bias: bool = False) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs, bias=bias, param_init=MATRIX)


def ffn(hf: Any, width: int) -> FeedForward.Config:
    return make_ffn_config(dim=hf.hidden_size, hidden_dim=width, w1_param_init=MATRIX, w2w3_param_init=MATRIX)


def build_parts(module: nn.Module, config: Any, *names: str) -> None:
    """Build the config's fields `names` as submodules of `module`. A field that is None gives a None submodule."""
    for name in names:
        part = getattr(config, name)
        setattr(module, name, None if part is None else part.build())


def embedding_and_head(hf: Any) -> dict[str, Any]:
    """Return the fields of a decoder's config before and after its layers: embedding, norm, head, weight tying."""
    return {
        "dim": hf.hidden_size,
        "vocab_size": hf.vocab_size,
        "norm": norm(hf, hf.hidden_size),
        "tok_embeddings": Embedding.Config(
            num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size, param_init=MATRIX
        ),
        "lm_head": linear(hf.hidden_size, hf.vocab_size),
        "enable_weight_tying": hf.tie_word_embeddings,
    }


def model_spec(
    hf: Any, name: str, model: Any, adapter: type, parallelize: Callable[..., Any], pipeline: Any = None
) -> ModelSpec:
    return ModelSpec(
        name=name,
        flavor=hf.model_type,
        model=model,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        # torchtitan would update the router's selection bias at every step. RL keeps the checkpoint's bias.
        post_optimizer_build_fn=None,
        state_dict_adapter=adapter,
    )


def refuse(hf: Any, **features: object) -> None:
    """Raise ValueError that the first of `features` (name to config value) with a true value is not implemented."""
    for name, value in features.items():
        if value:
            raise ValueError(f"{name} {value} is not supported for {hf.model_type}")


def refuse_other_activations(hf: Any) -> None:
    """Raise ValueError if the config's feed-forward networks are not SwiGLU."""
    refuse(hf, activation="" if hf.hidden_act == "silu" else hf.hidden_act)
