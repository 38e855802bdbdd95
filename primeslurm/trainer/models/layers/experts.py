"""Mixtures of experts whose experts are not torchtitan's SwiGLU of three matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.config_utils import make_token_dispatcher_config
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.moe_sharding import expert_param_placement_sparse
from torchtitan.protocols.sharding import ShardingConfig


def routed(experts: Any, top_k: int, kind: type[RoutedExperts] = RoutedExperts, **more: Any) -> Any:
    """A config of `kind` that sends each token to `top_k` of `experts`, over ranks by all-to-all."""
    dispatcher = make_token_dispatcher_config(num_experts=experts.num_experts, top_k=top_k, comm_backend="standard")
    return kind.Config(inner_experts=experts, token_dispatcher=dispatcher, **more)


def spread(moe: Any, *parameters: str) -> None:
    """Let expert parallelism split the experts' `parameters`, by their first dimension, in a MoE config."""
    layout = dict.fromkeys(parameters, expert_param_placement_sparse())
    moe.routed_experts.inner_experts.sharding_config = ShardingConfig(state_shardings=layout)


def local(parameter: Any, dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of an expert parameter."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).to(dtype)
