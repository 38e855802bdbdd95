"""A loss of your own: REINFORCE with truncated importance weights.

`own_loss.yaml` names it. The trainer's ranks import it.
"""

from __future__ import annotations

import torch

from primeslurm.trainer.components.loss import Sums, Targets


def truncated(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets, cap: float) -> Sums:
    """-min(r, cap) * A * log p, summed over trained tokens (weights as in IMPALA, arXiv 1802.01561).

    Args:
        logprobs: the trainer's log-probabilities of the trained tokens, [tokens].
        entropy: of the policy where each of them was sampled, in nats; it carries no gradient.
        targets: what is known of each of them, the engine's log-probability and the advantage among it.
        cap: largest weight r = p_trainer / p_engine. Weights are no part of the gradient.
    """
    ratio = (logprobs.detach() - targets.logprobs).exp()
    loss = -(ratio.clamp(max=cap) * targets.advantages * logprobs).sum()
    return Sums(loss, {"capped_fraction": (ratio > cap).float().sum()})
