"""Log-probabilities and entropies of the trained tokens from hidden states: whole logits need never exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common import Linear

from primeslurm.trainer.base.model_draft import ModelDraft

Scores = tuple[torch.Tensor, torch.Tensor]


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    places: torch.Tensor,
    chunk: int | None,
) -> Scores:
    """Log-probability of each trained token at its sampling temperature, and the entropy it was drawn at.

    Args:
        hidden: [rows, len, dim], what the head reads.
        weight: [vocab, dim], the head's.
        labels: [trained tokens].
        temperatures: [trained tokens].
        places: [trained tokens] int64, which of the rows * len positions predict them. Nothing is computed for others.
        chunk: logits of this many tokens exist at once, and are computed anew in the backward pass. None: of all of
            them, kept for the backward pass.

    Returns:
        Two float32 tensors [trained tokens]; the entropy carries no gradient.
    """
    chosen = (hidden.flatten(0, 1).index_select(0, places), weight, labels, temperatures)
    if chunk is None:
        return _score(*chosen)
    scores: Scores = _InChunks.apply(*chosen, chunk)
    return scores


def logit_scores(logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor) -> Scores:
    """`token_logprobs` of tokens whose logits [tokens, vocab] exist."""
    scores: Scores = _OfLogits.apply(logits, labels, temperatures)
    return scores


class _OfLogits(torch.autograd.Function):
    """As few passes over the logits as can be: with a vocabulary of 150,000 they count beside the product before them.

    Left to autograd this takes more than twice the time, and keeps more float32 tensors of that size than one.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor) -> Scores:
        # temperatures are float32, and so is the quotient
        log_p = (logits / temperatures.unsqueeze(-1)).log_softmax(-1)
        logprobs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        p = log_p.exp()
        entropy = -torch.einsum("tv,tv->t", p, log_p)
        ctx.save_for_backward(p, labels, temperatures)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, labels, temperatures = ctx.saved_tensors
        return _slope(p, labels, grad / temperatures, ctx.dtype), None, None


def _slope(p: torch.Tensor, labels: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of scaled logits: of each token's label by 1 - p, of all others by -p, times `grad` [tokens]."""
    chosen, grad = labels.unsqueeze(-1), grad.unsqueeze(-1)
    slope = torch.mul(p, -grad, out=torch.empty_like(p, dtype=dtype))
    return slope.scatter_(-1, chosen, (grad * (1 - p.gather(-1, chosen))).to(dtype))


def _score(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor) -> Scores:
    return logit_scores(F.linear(hidden, weight), labels, temperatures)


class _InChunks(torch.autograd.Function):
    """`_score` over chunks of tokens, of which nothing is kept but the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperatures: torch.Tensor,
        chunk: int,
    ) -> Scores:
        ctx.save_for_backward(hidden, weight, labels, temperatures)
        ctx.chunk = chunk
        pieces = zip(*(values.split(chunk) for values in (hidden, labels, temperatures)), strict=True)
        logprobs, entropy = zip(*(_score(h, weight, label, t) for h, label, t in pieces), strict=True)
        result = torch.cat(logprobs), torch.cat(entropy)
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, temperatures = ctx.saved_tensors
        # float32: many chunks add up in it.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_hidden = []
        pieces = zip(*(values.split(ctx.chunk) for values in (hidden, labels, temperatures, grad)), strict=True)
        for h, label, t, g in pieces:
            p = (F.linear(h, weight) / t.unsqueeze(-1)).softmax(-1)
            slope = _slope(p, label, g / t, h.dtype)
            grad_hidden.append(slope @ weight)
            grad_weight += slope.t() @ h
        return torch.cat(grad_hidden), grad_weight.to(weight.dtype), None, None, None


class ScoringHead(Linear):
    """A language model's head that returns logits, or scores while it is told what to score.

    The decoder passes its head nothing but hidden states; and the head is where FSDP has its weight gathered.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Linear's, and how the head is computed."""

        chunk: int | None = None
        """As in `token_logprobs`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._chunk = config.chunk
        self._targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def scoring(self, labels: torch.Tensor, temperatures: torch.Tensor, places: torch.Tensor) -> Iterator[None]:
        """Within the body the model returns `token_logprobs` instead of logits.

        Args:
            labels: [trained tokens].
            temperatures: [trained tokens].
            places: [trained tokens], as in `token_logprobs`.
        """
        self._targets = labels, temperatures, places
        try:
            yield
        finally:
            self._targets = None

    def forward(self, input: torch.Tensor) -> Any:
        """Logits [rows, len, vocab]; within `scoring`, log-probabilities and entropies [trained tokens]."""
        if self._targets is None:
            return super().forward(input)
        return token_logprobs(input, self.weight, *self._targets, self._chunk)


def convert(draft: ModelDraft) -> None:
    """Give a model the head that scores."""
    head = draft.config.lm_head
    values = {field.name: getattr(head, field.name) for field in fields(head)}
    draft.config.lm_head = ScoringHead.Config(**values, chunk=draft.recipe.trainer.memory.lm_head_chunk)
