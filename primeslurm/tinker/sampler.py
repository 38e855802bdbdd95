"""Samples from adapters that were saved for sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from primeslurm.tinker.backbone import Backbone, read
from primeslurm.tinker.requests import Datum, SamplingParams

Samples = tuple[list[tuple[str, list[int], list[float]]], list[float] | None]
"""Sequences (stop reason, tokens, log-probabilities), and the log-probability of each token of the prompt."""


class TrainerSampler:
    """Samples with the trainer's model: exactly the model that is trained, but without a KV cache.

    The samples of a request are computed together. Each token costs a forward pass over the whole sequence.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._tokenizer = AutoTokenizer.from_pretrained(backbone.limits.model)
        self._ends = end_tokens(backbone.limits.model)

    def sample(
        self,
        weights: Path | None,
        prompt: Sequence[int],
        params: SamplingParams,
        count: int,
        scored: int,
        check: Callable[[], object] = lambda: None,
    ) -> Samples:
        """Sample `count` sequences. Log-probabilities are the model's own, at temperature 1.

        `weights` is the file of an adapter; None is the base model. `scored` is the number of tokens at the end of the
        prompt to score. The others have NaN. 0: the result has no log-probabilities of the prompt. `check` is called
        before each token, and ends the work if it raises.
        """
        self._backbone.use([read(weights)] if weights else [])
        room = self._backbone.limits.length - len(prompt) + 1  # the model does not read the last token
        limit = room if params.max_tokens is None else params.max_tokens
        generator = torch.Generator().manual_seed(params.seed % 2**63) if params.seed is not None else None
        sampled: list[list[int]] = [[] for _ in range(count)]
        logprobs: list[list[float]] = [[] for _ in range(count)]
        reasons = ["length"] * count
        unfinished = list(range(count))
        for _ in range(limit):
            check()
            rows = torch.tensor(
                [[*prompt, *sampled[index]] for index in unfinished], device=self._backbone.policy.device
            )
            # On the CPU, so that a seed gives the same samples on every device that computes the same logits.
            scores = self._backbone.next_logits(rows).cpu().log_softmax(-1)
            tokens = choose(scores, params, generator)
            for index, token, row in zip(unfinished, tokens.tolist(), scores, strict=True):
                sampled[index].append(token)
                logprobs[index].append(row[token].item())
                if self._stops(sampled[index], params):
                    reasons[index] = "stop"
            unfinished = [index for index in unfinished if reasons[index] != "stop"]
            if not unfinished:
                break
        return list(zip(reasons, sampled, logprobs, strict=True)), self._scores(prompt, scored)

    def _stops(self, tokens: list[int], params: SamplingParams) -> bool:
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        if stop == []:
            return False
        words = [word for word in stop or () if isinstance(word, str)]
        if tokens[-1] in self._ends or tokens[-1] in (stop or ()):
            return True
        text = self._tokenizer.decode(tokens) if words else ""
        return any(word in text for word in words)

    def _scores(self, prompt: Sequence[int], scored: int) -> list[float] | None:
        if not scored:
            return None
        tokens = np.array(prompt)
        scores = [float("nan")] * len(prompt)
        count = min(scored, len(prompt) - 1)  # nothing predicts the first token
        if count:
            with torch.no_grad():
                row = [Datum(tokens[:-1], {"target_tokens": tokens[1:]})]
                scores[-count:] = self._backbone.logprobs([row])[-count:].tolist()
        return scores


def choose(scores: torch.Tensor, params: SamplingParams, generator: torch.Generator | None) -> torch.Tensor:
    """Choose a token of each row of log-probabilities [rows, vocabulary]. Returns [rows]."""
    if params.temperature == 0:
        return scores.argmax(-1)
    scores = scores / params.temperature
    if params.top_k <= 0 and params.top_p == 1:
        return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)
    ordered, tokens = scores.sort(-1, descending=True)
    if params.top_k > 0:
        ordered[:, params.top_k :] = -torch.inf
    probabilities = ordered.softmax(-1)
    if params.top_p < 1:
        # The first tokens whose probabilities add up to top_p, including the one that reaches it.
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= params.top_p] = 0
    return tokens.gather(-1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(-1)


def end_tokens(model: str) -> frozenset[int]:
    """Return the tokens that end a sample of the model in this directory."""
    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the model has no generation_config.json
        ends = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model)).eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
