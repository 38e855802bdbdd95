"""Example of an own loss: REINFORCE with truncated importance weights.

`own_loss.yaml` selects it. The trainer imports it.
"""

from __future__ import annotations

import torch

from primeslurm.trainer.components.loss import Sums, Targets


def truncated(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets, cap: float) -> Sums:
    """Return the sum of -min(r, cap) * A * log p over trained tokens (weights as in IMPALA, arXiv 1802.01561).

    Args:
        logprobs: log-probabilities of the trained tokens under the trainer's policy, [tokens].
        entropy: entropy of the policy at each of these tokens [nats], without gradient, [tokens].
        targets: the engine's log-probability, the advantage and more of each token.
        cap: largest weight r = p_trainer / p_engine. Weights have no gradient.
    """
    ratio = (logprobs.detach() - targets.logprobs).exp()
    loss = -(ratio.clamp(max=cap) * targets.advantages * logprobs).sum()
    return Sums(loss, {"capped_fraction": (ratio > cap).float().sum()})
