"""Router replay (arXiv 2510.11370): the trainer sends tokens to the experts that the engines chose.

Trainer and engines round differently, so they may choose different experts, which changes log-probabilities by far more
than rounding. The weights of the chosen experts come from the trainer's scores, so the router still gets a gradient.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from primeslurm.nn import compat
from primeslurm.trainer.base.model_draft import ModelDraft


class ReplayRouter(TokenChoiceTopKRouter):
    """A router that uses `replayed` experts [rows, len, top_k] where they are known, and its own choice elsewhere."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """torchtitan's router config, plus the layer's index."""

        layer: int = -1  # index of the layer in the model, which selects the experts to replay

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer = config.layer
        self.replayed: torch.Tensor | None = None

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weights and ids of the chosen experts [rows, len, top_k], and all scores."""
        weights, own_choice, scores = super().forward(x_BLD, expert_bias_E)
        if self.replayed is None:
            return weights, own_choice, scores
        replayed = self.replayed.to(own_choice.dtype)
        # With uint8 ids and 256 experts, the marker of unknown tokens is also a valid id. For top_k > 1, the test for
        # repeats below finds unknown tokens anyway.
        valid = (self.replayed != _unknown(self.replayed.dtype)) | (self.top_k > 1)
        valid &= (replayed >= 0) & (replayed < self.num_experts)
        # Repeated experts must not be used: the counts of tokens per expert would be too small, and rows of other
        # tokens would reach wrong experts.
        same = replayed.unsqueeze(-1) == replayed.unsqueeze(-2)
        usable = valid.all(-1) & (same.sum((-2, -1)) == self.top_k)
        chosen = torch.where(usable.unsqueeze(-1), replayed, own_choice)
        weights = scores.gather(-1, chosen)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.route_scale, chosen, scores


def convert(draft: ModelDraft) -> None:
    """Replace the routers if the recipe enables replay. Raises ValueError if there are none."""
    if not draft.recipe.trainer.router_replay:
        return
    compat.swap(draft.config, TokenChoiceTopKRouter, ReplayRouter)
    routers = list(draft.config.traverse(ReplayRouter.Config))
    if not routers:
        raise ValueError("trainer.router_replay: the model has no router that supports replay")
    for name, config, _, _ in routers:
        config.layer = _layer(name)


def narrow(routed: torch.Tensor) -> torch.Tensor:
    """View uint16 ids as int16: torch supports few operations on uint16, and no model has more than 32,767 experts."""
    return routed.view(torch.int16) if routed.dtype == torch.uint16 else routed


def assign(model: torch.nn.Module, routed: torch.Tensor | None) -> None:
    """Set the experts [rows, len, layers, top_k], after `narrow`, that a model's routers replay. None replays nothing.

    Raises ValueError if the numbers of layers and top_k differ from the model's.
    """
    for module in model.modules():
        if isinstance(module, ReplayRouter):
            module.replayed = None if routed is None else _of_layer(routed, module)


def _of_layer(routed: torch.Tensor, router: ReplayRouter) -> torch.Tensor:
    layers, top_k = routed.shape[2:]
    if router.layer >= layers or top_k != router.top_k:
        raise ValueError(
            f"routed experts of {layers} layers x {top_k}, but layer {router.layer} of the policy has {router.top_k}"
        )
    return routed[:, :, router.layer]


def _layer(name: str) -> int:
    match = re.search(r"\blayers\.(\d+)\.", name)
    if match is None:
        raise ValueError(f"{name} is in no numbered layer")
    return int(match[1])


def _unknown(dtype: torch.dtype) -> int:
    return -1 if dtype.is_signed else torch.iinfo(dtype).max
