"""Speculative decoding of the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section


class Speculation(Section):
    """Draft several tokens at a time, and let the policy accept or replace them in one step.

    The distribution of the tokens and their log-probabilities stay those of the policy.
    """

    method: Literal["ngram", "mtp", "eagle", "eagle3"]
    """Source of the draft tokens. ngram: repetitions in the prompt and answer, for any model. mtp: the draft layers of
    the model's checkpoint. eagle and eagle3: a draft model. Drafters keep their weights while the policy changes, so
    fewer tokens are accepted over time. Only `trainer.draft_layer` trains draft layers."""
    num_tokens: int = Field(ge=1, le=128)
    """Number of draft tokens in each step."""
    prompt_lookup_min: PositiveInt | None = None
    """Shortest repetition to look for [tokens]; only with `ngram`. Default: `prompt_lookup_max`, else 5."""
    prompt_lookup_max: PositiveInt | None = None
    """Longest repetition to look for [tokens]; only with `ngram`. Default: `prompt_lookup_min`, else 5."""
    model: str | None = None
    """Directory or hub id of the draft model, for `eagle` and `eagle3`."""

    def is_used_by(self, role: str) -> bool:
        """Return whether engines of a role draft: engine, prefill or decode."""
        # Draft layers have KV cache of their own, and NIXL refuses engines whose KV caches differ.
        return role != "prefill" or self.method != "ngram"
