"""Check that a rollout can come from the policy: its tokens are in the vocabulary, its experts are in the model.

Other rollouts fail, because the trainer would crash if it looked up a token or an expert that the model does not have.
If a token's experts repeat, the engine did not record them, and the trainer's router chooses them.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec

from primeslurm.base.files import read_json
from primeslurm.base.model_files import model_directory
from primeslurm.models.hf_config import shape_of
from primeslurm.models.shape import ModelShape
from primeslurm.orchestrator.rollouts.job_protocol import RolloutError
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.batches.routed_experts import RoutedExperts, count_unknown, without_repeats
from primeslurm.wire.decoding import DamagedError

log = logging.getLogger(__name__)


class RolloutValidator:
    """Checks rollouts of one model.

    `model`: path of the policy. If its config is not understood, every rollout passes.
    """

    def __init__(self, model: str) -> None:
        self._shape = _shape(model)
        self._warned = False

    @property
    def vocab(self) -> int | None:
        """Return the number of tokens of the model, or None if its config is not understood."""
        return self._shape.vocab if self._shape is not None else None

    def checked(self, rollout: Rollout) -> Rollout:
        """Return the rollout with unknown experts marked. Raise RolloutError if it cannot come from the model."""
        if self._shape is None:
            return rollout
        largest = int(rollout.token_ids.max(initial=-1))
        if largest >= self._shape.vocab:
            raise RolloutError(f"token {largest} is not in the vocabulary, which has {self._shape.vocab}")
        if rollout.routed_experts is None or self._shape.experts is None:
            return rollout
        routed, repeating = _check_experts(rollout.routed_experts, self._shape)
        unknown = count_unknown(rollout.routed_experts)
        if not repeating and not unknown:
            return rollout
        if repeating and not self._warned:
            text = (
                "%s: the engine returned repeated experts for %d of %d tokens. The trainer's router chooses for them."
            )
            log.warning(text + " Further rollouts are only counted.", rollout.info.id, repeating, len(routed))
            self._warned = True
        info = msgspec.structs.replace(rollout.info, repeated_experts=repeating, unknown_experts=unknown)
        return replace(rollout, info=info, routed_experts=routed)


def _check_experts(routed: RoutedExperts, shape: ModelShape) -> tuple[RoutedExperts, int]:
    assert shape.experts is not None
    count, top_k = shape.experts.count, shape.experts.top_k
    if routed.shape[1] < shape.layers or routed.shape[2] != top_k:
        text = f"routed experts of {routed.shape[1]} layers x {routed.shape[2]}"
        raise RolloutError(f"{text}, but the model has {shape.layers} x {top_k}")
    try:
        return without_repeats(routed, shape.expert_layers, count)
    except DamagedError as error:
        raise RolloutError(str(error)) from error


def _shape(model: str) -> ModelShape | None:
    directory = model_directory(model)
    config = read_json(directory / "config.json") if directory is not None else None
    try:
        return shape_of(config) if config is not None else None
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
