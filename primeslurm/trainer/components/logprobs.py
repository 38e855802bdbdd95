"""Log-probabilities and entropies of the trained tokens, computed from hidden states without storing all logits."""

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
    dtype: torch.dtype | None = None,
) -> Scores:
    """Return log-probabilities and entropies (without gradient) of the trained tokens, float32 [trained tokens].

    `hidden` [rows, len, dim] is the input of the head and `weight` [vocab, dim] its weight. `labels` and `temperatures`
    are [trained tokens], and `places` the positions (indices into rows * len) that predict them. The logits of `chunk`
    tokens exist at once, and are recomputed in the backward pass. None: all are saved. `dtype` is that of logits. None:
    the dtype of `hidden`.
    """
    chosen = (hidden.flatten(0, 1).index_select(0, places), weight, labels, temperatures)
    if chunk is None:
        return _score(*chosen, dtype)
    scores: Scores = _InChunks.apply(*chosen, chunk, dtype)
    return scores


def logit_scores(logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor) -> Scores:
    """Return log-probabilities and entropies as `token_logprobs` does, from logits [tokens, vocab]."""
    scores: Scores = _OfLogits.apply(logits, labels, temperatures)
    return scores


@torch.no_grad()
def next_token_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int | None, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy, how many labels are the most likely token, and the loss's gradient.

    `hidden` is [tokens, dim], as is the gradient with respect to it; `labels` is [tokens]. All else as in
    `token_logprobs`. Only the logits of `chunk` tokens exist at once.
    """
    losses, hits, gradients = [], [], []
    for h, label in zip(*(values.split(chunk or max(1, len(labels))) for values in (hidden, labels)), strict=True):
        log_p = _product(h, weight, dtype).float().log_softmax(-1)
        chosen = log_p.gather(-1, label.unsqueeze(-1)).squeeze(-1)
        losses.append(-chosen.sum())
        hits.append((log_p.argmax(-1) == label).sum())
        gradients.append(_slope(log_p.exp(), label, torch.full_like(chosen, -1), h.dtype) @ weight)
    return torch.stack(losses).sum(), torch.stack(hits).sum(), torch.cat(gradients)


class _OfLogits(torch.autograd.Function):
    """Autograd function from logits to log-probabilities and entropies, with few passes over the logits."""

    # With a vocabulary of 150,000, these passes take time comparable to the matrix product. Plain autograd takes more
    # than twice as long and saves several float32 tensors of the size of the logits instead of one.

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor) -> Scores:
        # Temperatures are float32, so the division promotes the logits.
        log_p = (logits / temperatures.unsqueeze(-1)).log_softmax(-1)
        # Not `gather`, which needs a view of its result: FSDP warns of views, because its hooks do not follow them.
        logprobs = -F.nll_loss(log_p, labels, reduction="none")
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
    """Return the gradient of scaled logits: `grad` [tokens] times 1 - p for the label, and times -p for all others."""
    chosen, grad = labels.unsqueeze(-1), grad.unsqueeze(-1)
    slope = torch.mul(p, -grad, out=torch.empty_like(p, dtype=dtype))
    return slope.scatter_(-1, chosen, (grad * (1 - p.gather(-1, chosen))).to(dtype))


def _product(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return logits in `dtype`, not rounded to a narrower one first. Does not record gradients on a GPU."""
    if dtype in (None, hidden.dtype):
        return F.linear(hidden, weight)
    if hidden.is_cuda:  # without a float32 copy of the weight
        return torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=dtype).unflatten(0, hidden.shape[:-1])
    return F.linear(hidden.to(dtype), weight.to(dtype))


class _WideLogits(torch.autograd.Function):
    """Logits of a wider dtype than hidden states and weight. Gradients are products in the narrow dtype."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return _product(hidden, weight, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        slope = grad.to(hidden.dtype)
        grad_hidden = slope @ weight if ctx.needs_input_grad[0] else None
        grad_weight = slope.flatten(0, -2).t() @ hidden.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype in (None, hidden.dtype):
        return F.linear(hidden, weight)
    logits: torch.Tensor = _WideLogits.apply(hidden, weight, dtype)
    return logits


def _score(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    dtype: torch.dtype | None,
) -> Scores:
    return logit_scores(_logits(hidden, weight, dtype), labels, temperatures)


class _InChunks(torch.autograd.Function):
    """`_score` in chunks of tokens. Saves only the inputs for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperatures: torch.Tensor,
        chunk: int,
        dtype: torch.dtype | None,
    ) -> Scores:
        ctx.save_for_backward(hidden, weight, labels, temperatures)
        ctx.chunk, ctx.dtype = chunk, dtype
        chunks = zip(*(values.split(chunk) for values in (hidden, labels, temperatures)), strict=True)
        logprobs, entropy = zip(*(_score(h, weight, label, t, dtype) for h, label, t in chunks), strict=True)
        result = torch.cat(logprobs), torch.cat(entropy)
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, temperatures = ctx.saved_tensors
        # Accumulated in float32, because it is a sum over many chunks.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_hidden = []
        chunks = zip(*(values.split(ctx.chunk) for values in (hidden, labels, temperatures, grad)), strict=True)
        for h, label, t, g in chunks:
            p = (_product(h, weight, ctx.dtype) / t.unsqueeze(-1)).softmax(-1)
            slope = _slope(p, label, g / t, h.dtype)
            grad_hidden.append(slope @ weight)
            if grad_weight is not None:
                grad_weight += slope.t() @ h
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return torch.cat(grad_hidden), of_weight, None, None, None, None


class Scorable:
    """Mixin of modules that return logits, or log-probabilities and entropies within `scoring`."""

    _targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def scoring(self, labels: torch.Tensor, temperatures: torch.Tensor, places: torch.Tensor) -> Iterator[None]:
        """Within the `with` body, the model returns `token_logprobs` of these arguments instead of logits."""
        # Scores are computed in the head's forward pass, because FSDP has gathered the weight only there. The labels
        # are set beforehand, because the decoder passes only hidden states to its head.
        self._targets = labels, temperatures, places
        try:
            yield
        finally:
            self._targets = None


class ScoringHead(Scorable, Linear):
    """A language model head that can return log-probabilities and entropies instead of logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """torchtitan's Linear config, plus the chunk size [tokens] and the dtype of logits."""

        chunk: int | None = None  # as in `token_logprobs`
        dtype: torch.dtype | None = None  # as in `token_logprobs`

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk, self.dtype = config.chunk, config.dtype

    def forward(self, input: torch.Tensor) -> Any:
        """Return logits [rows, len, vocab], or scores [trained tokens] within `scoring`."""
        if self._targets is None:
            return super().forward(input) if self.dtype is None else _logits(input, self.weight, self.dtype)
        return token_logprobs(input, self.weight, *self._targets, self.chunk, self.dtype)


def convert(draft: ModelDraft) -> None:
    head = draft.config.lm_head
    values = {field.name: getattr(head, field.name) for field in fields(head)}
    dtype = torch.float32 if draft.recipe.model.head_dtype == "float32" else None
    chunk = draft.recipe.trainer.memory.lm_head_chunk
    draft.config.lm_head = ScoringHead.Config(**values, chunk=chunk, dtype=dtype)
