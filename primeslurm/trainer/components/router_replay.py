"""Router replay: tokens go to the experts that the engines sent them to, so that both compute the same function.

Where trainer and engines round differently, scores that are close to one another lead to other experts, and log-probs
of the same tokens differ by far more than rounding. Replayed (arXiv 2510.11370), only the choice is the engines': the
weights of the chosen experts come from the trainer's own scores, so the gate keeps its gradient.

Replayed experts of a token are used only if they differ from one another and the layer has all of them. With a repeat,
the counts of tokens per expert would be too small: rows of other tokens would go to wrong experts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from primeslurm.nn import compat
from primeslurm.trainer.base.model_draft import ModelDraft


class ReplayRouter(TokenChoiceTopKRouter):
    """A router that takes `replayed` experts, [rows, len, top_k], where there are any, and its own elsewhere."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """TokenChoiceTopKRouter's, and where the router is."""

        layer: int = -1
        """Index among all layers of the model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer = config.layer
        self.replayed: torch.Tensor | None = None

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As TokenChoiceTopKRouter: weights and ids of the chosen experts [rows, len, top_k], scores of all."""
        weights, own, scores = super().forward(x_BLD, expert_bias_E)
        if self.replayed is None:
            return weights, own, scores
        replayed = self.replayed.to(own.dtype)
        # The marker of unknown tokens is the number of an expert if there are 256, which matters for a top_k of 1.
        there = (self.replayed != _unknown(self.replayed.dtype)) | (self.top_k > 1)
        there &= (replayed >= 0) & (replayed < self.num_experts)
        same = replayed.unsqueeze(-1) == replayed.unsqueeze(-2)
        usable = there.all(-1) & (same.sum((-2, -1)) == self.top_k)
        chosen = torch.where(usable.unsqueeze(-1), replayed, own)
        weights = scores.gather(-1, chosen)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.route_scale, chosen, scores


def convert(draft: ModelDraft) -> None:
    """Have a model's routers replay, if the recipe says so. Raises ValueError for a model that has none of them."""
    if not draft.recipe.trainer.router_replay:
        return
    compat.swap(draft.config, TokenChoiceTopKRouter, ReplayRouter)
    found = list(draft.config.traverse(ReplayRouter.Config))
    if not found:
        raise ValueError("trainer.router_replay: the model has no router whose choice could be replayed")
    for name, config, _, _ in found:
        config.layer = _layer(name)


def narrow(routed: torch.Tensor) -> torch.Tensor:
    """uint16, which torch knows little of, as int16: there are no models of more than 32,767 experts."""
    return routed.view(torch.int16) if routed.dtype == torch.uint16 else routed


def assign(model: torch.nn.Module, routed: torch.Tensor | None) -> None:
    """Set what a model's routers replay in the next forward pass, and its backward pass, which may compute it anew.

    Args:
        model: whose routers these are.
        routed: `narrow`ed [rows, len, layers, top_k], as described in `wire.batches.routed_experts`. None: nothing.

    Raises:
        ValueError: it is of another model.
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
