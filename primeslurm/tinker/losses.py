"""Losses of the Tinker API (https://tinker-docs.thinkingmachines.ai/tinker/losses). A loss is a sum over tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from primeslurm.tinker.requests import Config, thresholds


def per_token(loss: str, config: Config, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return each target's term of a loss [targets]. `logprobs` are the model's, `inputs` those of the client."""
    if loss == "cross_entropy":
        return -logprobs * inputs["weights"]
    # The trainer's losses equal these, but their recipe accepts only bounds around 1, and caps the ratio.
    ratio, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
    if loss == "importance_sampling":
        return -ratio * advantages
    clipped = ratio.clamp(*thresholds(loss, config))
    if loss == "ppo":
        return -torch.min(ratio * advantages, clipped * advantages)
    return -clipped.detach() * logprobs * advantages
