"""Configs of mixtures of experts, and helpers for experts that are not torchtitan's SwiGLU of three matrices."""

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

# torchtitan creates the router's selection bias only if it may update it, by this much per step. But nothing calls the
# update: engines select experts by the checkpoint's bias, so the trainer has to as well.
_BIAS_UPDATE_RATE = 1e-3


def sigmoid_moe(
    hf: Any,
    experts: int,
    routed_experts: Any,
    shared_experts: Any = None,
    *,
    normalize: bool = True,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
) -> MoE.Config:
    """Return experts whose router scores by sigmoid and selects by score plus bias.

    The scores of a token's experts are scaled to add up to 1 if `normalize`, then multiplied by `scale`. `groups` are
    the number of expert groups, and the number of groups from which a token's experts come.
    """
    limited = groups[0] > 1
    options = {"num_expert_groups": groups[0], "num_limited_groups": groups[1]} if limited else {}
    router = _router(hf, experts, "sigmoid", normalize, route_scale=scale, **options)
    return _moe(experts, router, routed_experts, shared_experts, load_balance_coeff=_BIAS_UPDATE_RATE)


def softmax_moe(
    hf: Any,
    experts: int,
    routed_experts: Any,
    shared_experts: Any = None,
    *,
    normalize: bool = True,
    bias: bool = False,
) -> MoE.Config:
    """Return experts whose router scores by softmax. `normalize` as in `sigmoid_moe`."""
    router = _router(hf, experts, "softmax", normalize, bias=bias)
    # No load-balancing bias: engines do not know it.
    return _moe(experts, router, routed_experts, shared_experts, load_balance_coeff=None)


def _router(hf: Any, experts: int, score: str, normalize: bool, **options: Any) -> Any:
    return make_router_config(
        dim=hf.hidden_size,
        num_experts=experts,
        gate_param_init=MATRIX,
        top_k=hf.num_experts_per_tok,
        score_func=score,
        route_norm=normalize,
        **options,
    )


def _moe(experts: int, router: Any, routed_experts: Any, shared_experts: Any, **options: Any) -> MoE.Config:
    parts = {"router": router, "routed_experts": routed_experts, "shared_experts": shared_experts}
    return make_moe_config(num_experts=experts, **parts, **options)


def swiglu_experts(hf: Any, experts: int, width: int) -> Any:
    return make_routed_experts_config(
        dim=hf.hidden_size,
        hidden_dim=width,
        num_experts=experts,
        top_k=hf.num_experts_per_tok,
        param_init=EXPERTS,
        comm_backend="standard",
    )


def dense_or_moe(hf: Any, dense: bool, *, experts: int, shared_width: int, **router: Any) -> dict[str, Any]:
    """Return the second half of a `GqaBlock.Config`: a feed-forward network, or experts with a sigmoid router."""
    if dense:
        return {"feed_forward": ffn(hf, hf.intermediate_size)}
    shared = ffn(hf, shared_width) if shared_width else None
    return {"moe": sigmoid_moe(hf, experts, swiglu_experts(hf, experts, hf.moe_intermediate_size), shared, **router)}


def routed(experts: Any, top_k: int, kind: type[RoutedExperts] = RoutedExperts, **fields: Any) -> Any:
    """Return a config of `kind` that sends each token to `top_k` of `experts`, over ranks by all-to-all."""
    dispatcher = make_token_dispatcher_config(num_experts=experts.num_experts, top_k=top_k, comm_backend="standard")
    return kind.Config(inner_experts=experts, token_dispatcher=dispatcher, **fields)


def shard_experts(moe: Any, *parameters: str) -> None:
    """Let expert parallelism split `parameters` [experts, ...] of a layer `moe` by their first dimension."""
    layout = dict.fromkeys(parameters, expert_param_placement_sparse())
    moe.routed_experts.inner_experts.sharding_config = ShardingConfig(state_shardings=layout)


def local(parameter: Any, dtype: torch.dtype) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).to(dtype)
