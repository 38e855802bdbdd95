"""Mixtures of experts: configs of those whose router scores by sigmoid and chooses by score plus bias.

Experts that are not torchtitan's SwiGLU of three matrices are put into a mixture by `routed` and `spread`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.common.moe_sharding import expert_param_placement_sparse
from torchtitan.protocols.sharding import ShardingConfig

from primeslurm.nn.layers.common import EXPERTS, MATRIX, ffn

_KEEP_BIAS = 1e-3
"""torchtitan has a bias only where it may move it, by so much a step. Nothing does: see gqa.model_spec."""


def sigmoid_moe(
    hf: Any,
    *,
    experts: int,
    width: int,
    shared_width: int = 0,
    normalise: bool = True,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
) -> MoE.Config:
    """Make the config of the experts of a layer.

    Args:
        hf: the model's config in transformers.
        experts: how many there are.
        width: intermediate size of one.
        shared_width: intermediate size of the shared ones together; 0 for none.
        normalise: scores of the chosen experts add up to 1, before `scale`.
        scale: factor of the chosen experts' scores.
        groups: how many groups there are, and from how many of them a token's experts come.
    """
    top_k, limited = hf.num_experts_per_tok, groups[0] > 1
    return make_moe_config(
        num_experts=experts,
        load_balance_coeff=_KEEP_BIAS,
        router=make_router_config(
            dim=hf.hidden_size,
            num_experts=experts,
            gate_param_init=MATRIX,
            top_k=top_k,
            score_func="sigmoid",
            route_norm=normalise,
            route_scale=scale,
            num_expert_groups=groups[0] if limited else None,
            num_limited_groups=groups[1] if limited else None,
        ),
        routed_experts=make_routed_experts_config(
            dim=hf.hidden_size,
            hidden_dim=width,
            num_experts=experts,
            top_k=top_k,
            param_init=EXPERTS,
            comm_backend="standard",
        ),
        shared_experts=ffn(hf, shared_width) if shared_width else None,
    )


def dense_or_moe(hf: Any, dense: bool, **experts: Any) -> dict[str, Any]:
    """Make the second half of a `gqa.Block.Config`: a dense network, or experts, as `sigmoid_moe` takes them."""
    if dense:
        return {"feed_forward": ffn(hf, hf.intermediate_size)}
    return {"moe": sigmoid_moe(hf, width=hf.moe_intermediate_size, **experts)}


def routed(experts: Any, top_k: int, kind: type[RoutedExperts] = RoutedExperts, **more: Any) -> Any:
    """Make a config of `kind` that sends each token to `top_k` of `experts`, over ranks by all-to-all."""
    dispatcher = make_token_dispatcher_config(num_experts=experts.num_experts, top_k=top_k, comm_backend="standard")
    return kind.Config(inner_experts=experts, token_dispatcher=dispatcher, **more)


def spread(moe: Any, *parameters: str) -> None:
    """Let expert parallelism split the experts' `parameters`, by their first dimension, in a MoE config."""
    layout = dict.fromkeys(parameters, expert_param_placement_sparse())
    moe.routed_experts.inner_experts.sharding_config = ShardingConfig(state_shardings=layout)


def local(parameter: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return this rank's part of an expert parameter."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).to(dtype)
