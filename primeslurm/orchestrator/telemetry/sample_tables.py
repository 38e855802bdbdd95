"""Tables of sampled rollouts for monitors: the text of a few rollouts of a batch, with their rewards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from primeslurm.base.model_files import locate
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.records.monitors import SampleRow
from primeslurm.wire.batches.rollout import Rollout

log = logging.getLogger(__name__)
ROWS = 8
# Longest text [characters]. The middle of longer ones is left out.
LONGEST = 8000
# Longest sequence that is decoded [tokens] from each end.
END_TOKENS = 4000


class SampleTables:
    """Chooses rollouts of batches and decodes them."""

    def __init__(self, recipe: Recipe) -> None:
        self._model = recipe.model.path
        monitor = recipe.monitor
        self._interval = monitor.sample_interval if monitor.wandb or monitor.mlflow else 0

    def of(self, groups: Sequence[RolloutGroup], step: int) -> list[SampleRow]:
        """Return the table of a batch, from the lowest to the highest reward; nothing if the step has none.

        Decoding takes some milliseconds, so call it outside of the event loop.
        """
        if not self._interval or (step != 1 and step % self._interval):
            return []
        rollouts = sorted(
            (trace[0] for group in groups for trace in group.traces), key=lambda first: first.info.net_reward
        )
        chosen = min(ROWS, len(rollouts))
        indices = {round(i * (len(rollouts) - 1) / max(1, chosen - 1)) for i in range(chosen)}
        return [self._row(rollouts[index], step) for index in sorted(indices)]

    def _row(self, rollout: Rollout, step: int) -> SampleRow:
        info = rollout.info
        return {
            "step": step,
            "environment": info.environment,
            "reward": info.reward,
            "length_penalty": info.length_penalty,
            "turns": info.turns,
            "tokens": len(rollout.token_ids),
            "sampled_tokens": int(rollout.mask.sum()),
            "finish_reason": info.finish_reason,
            "staleness": step - 1 - info.opened_version,
            "text": self._text(rollout),
            "id": info.id,
        }

    def _text(self, rollout: Rollout) -> str:
        if self._tokenizer is None:
            return ""
        ids = [int(token) for token in rollout.token_ids]
        if len(ids) > 2 * END_TOKENS:
            pieces = [self._decoded(ids[:END_TOKENS]), self._decoded(ids[-END_TOKENS:])]
        else:
            pieces = [self._decoded(ids)]
        text = "\n[...]\n".join(pieces)
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}\n[...]\n{text[-LONGEST // 2 :]}"

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Any:
        """The model's fast tokenizer; None if it has none."""
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(locate(self._model) / "tokenizer.json"))
        except Exception as error:  # the library raises plain exceptions
            log.warning("tables of rollouts have no text: %s", error)
            return None
