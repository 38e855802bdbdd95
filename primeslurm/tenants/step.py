"""One training step of a tenant, with passes of a Tinker service.

The loss L is computed here, from log-probabilities of a forward pass. A backward pass of the service has the loss
`sum(-weight * logprob)`. With `weight = -dL/dlogprob`, its gradient equals that of L.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import MAX_SKIPPED, Optimizer
from primeslurm.tenants.tinker_client import TinkerClient
from primeslurm.tinker.requests import AdamParams, Datum
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.components.loss import Documents, Sums, Targets, from_recipe
from primeslurm.wire.batches.batch import Batch, Row, lengths_of

# Fields of a row that a loss gets, for the token that a position predicts. The last two may be missing.
_TARGETS = ("logprobs", "advantages", "temperatures", "on_policy", "ref_logprobs", "echo_weights")


@dataclass(frozen=True)
class PackedSequence:
    """One packed sequence of a row, up to its last trained token."""

    tokens: NDArray[np.int32]
    targets: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """True for each position that predicts a trained token."""
    fields: dict[str, NDArray[Any]]
    """Fields of the row [trained tokens]."""

    def datum(self, weights: NDArray[np.float32] | None = None) -> Datum:
        """Return the sequence as data of a pass. `weights` are those of the trained tokens; None: only score them."""
        spread = np.zeros(len(self.trained), np.float32)
        if weights is not None:
            spread[self.trained] = weights
        return Datum(self.tokens, {"target_tokens": self.targets, "weights": spread})


class TenantStep:
    """The recipe's loss, optimizer and schedule, with an adapter in a Tinker service."""

    def __init__(self, recipe: Recipe, client: TinkerClient) -> None:
        self._optimizer, self._max_steps = recipe.trainer.optimizer, recipe.max_steps
        self._loss = from_recipe(recipe.trainer.loss)
        self._client = client
        self._skipped_in_a_row = 0

    def train(self, batch: Batch, timer: PhaseTimer) -> dict[str, float]:
        """Train one step, and return its metrics.

        If the gradient is not finite, the weights stay unchanged. The step still counts, and the metric `skipped` is 1.
        Raises FloatingPointError after MAX_SKIPPED such steps in a row.
        """
        tokens = max(1, batch.info.loss_tokens)
        sequences = [sequence for row in batch.rows for sequence in sequences_of(row)]
        with timer.phase("forward_backward"):
            logprobs = self._client.forward_backward([each.datum() for each in sequences], forward_only=True)
            scores = torch.from_numpy(_joined([all_[s.trained] for all_, s in zip(logprobs, sequences, strict=True)]))
            sums = self._loss(scores.requires_grad_(), torch.zeros_like(scores), targets_of(sequences))
            (gradient,) = torch.autograd.grad(sums.loss / tokens, scores)
            finite = bool(gradient.isfinite().all())
            if finite and sequences:
                parts = np.split(-gradient.numpy(), np.cumsum([each.trained.sum() for each in sequences])[:-1])
                data = [each.datum(part) for each, part in zip(sequences, parts, strict=True)]
                self._client.forward_backward(data)
        lr = learning_rate(self._optimizer, batch.info.step, self._max_steps)
        with timer.phase("optimizer"):
            norm = self._update(lr) if finite else math.nan
        skipped = not math.isfinite(norm)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= MAX_SKIPPED:
            text = f"no gradient was finite in {MAX_SKIPPED} consecutive steps"
            raise FloatingPointError(f"step {batch.info.step}: {text}")
        seconds = timer.seconds("forward_backward") + timer.seconds("optimizer")
        of_step = {"grad_norm": norm, "skipped": float(skipped), "lr": lr, "tokens": float(tokens)}
        return _metrics(sums, tokens) | of_step | {"tokens_per_s": tokens / seconds}

    def _update(self, lr: float) -> float:
        """Step the optimizer, and return the norm of the gradient. NaN if it is not finite."""
        settings = self._optimizer
        (beta1, beta2), clip, decay = settings.betas, settings.max_norm or 0.0, settings.weight_decay
        adam = {"learning_rate": lr, "beta1": beta1, "beta2": beta2, "eps": settings.eps}
        try:
            return self._client.optim_step(AdamParams(**adam, weight_decay=decay, grad_clip_norm=clip))
        except FloatingPointError:
            return math.nan


def sequences_of(row: Row) -> Iterator[PackedSequence]:
    """Yield the sequences of a row that have trained tokens."""
    # A position predicts the next token, and nothing predicts the first token of a sequence, whose position is 0.
    following = {name: np.append(a[1:], np.zeros(1, a.dtype)) for name, a in row.arrays().items() if a.ndim == 1}
    trained = following["mask"] | (following.get("echo_weights", np.zeros(1)) > 0)
    trained &= following["positions"] != 0
    start = 0
    for length in lengths_of(row.positions):
        places = start + np.flatnonzero(trained[start : start + length])
        if len(places):
            whole = slice(start, places[-1] + 1)
            targets, fields = (
                following["token_ids"][whole].astype(np.int64),
                {n: a[places] for n, a in following.items()},
            )
            yield PackedSequence(row.token_ids[whole], targets, trained[whole], fields)
        start += length


def targets_of(sequences: Sequence[PackedSequence]) -> Targets:
    """Return the targets of a loss [trained tokens]."""
    counts = torch.tensor([int(each.trained.sum()) for each in sequences], dtype=torch.int64)
    index = torch.repeat_interleave(torch.arange(len(sequences)), counts)
    known = [name for name in ("token_ids", *_TARGETS) if sequences and name in sequences[0].fields]
    joined = {name: torch.from_numpy(_joined([each.fields[name] for each in sequences])) for name in known}
    fields = dict.fromkeys(("token_ids", *_TARGETS[:-1]), torch.zeros(len(index))) | joined
    return Targets(labels=fields.pop("token_ids").long(), documents=Documents(index, len(sequences)), **fields)


def learning_rate(config: Optimizer, step: int, max_steps: int) -> float:
    """Return the learning rate of a step, counted from 1: that of the trainer's schedule."""
    warmup = min(config.warmup_steps, max_steps)
    if step <= warmup:
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup - 1) / (max_steps - warmup)  # the decay ends one step after the last
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def _metrics(sums: Sums, tokens: int) -> dict[str, float]:
    """Return the loss's metrics per trained token. The service does not return entropies."""
    metrics = {name: value.item() / tokens for name, value in sums.metrics.items() if name != "entropy"}
    on_policy = metrics.get("on_policy_fraction", 0.0)
    mismatch = metrics.pop("mismatch_kl", 0.0)
    return metrics | ({"mismatch_kl": mismatch / on_policy} if on_policy else {})


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
