"""Whether what was sampled can be of the policy: tokens of its vocabulary, experts that it has.

An engine that says otherwise costs its rollout. A trainer that looks a token or an expert up that it has not ends all.
"""

from __future__ import annotations

from primeslurm.families.config import shape_of
from primeslurm.families.shape import ModelShape
from primeslurm.files import read_json
from primeslurm.model_files import model_directory
from primeslurm.orchestrator.rollouts.job_protocol import RolloutError
from primeslurm.wire.batches.rollouts import Rollout
from primeslurm.wire.batches.routed_experts import RoutedExperts


class Plausible:
    """Looks at rollouts.

    Args:
        model: path of the policy's. One whose config is not understood is taken to have whatever is said.
    """

    def __init__(self, model: str) -> None:
        self._shape = _shape(model)

    def checked(self, rollout: Rollout) -> Rollout:
        """Return a rollout as it is.

        Raises:
            RolloutError: it cannot be of this model.
        """
        if self._shape is not None:
            largest = int(rollout.token_ids.max(initial=-1))
            if largest >= self._shape.vocab:
                raise RolloutError(f"token {largest} is not in the vocabulary, which has {self._shape.vocab}")
            if rollout.routed_experts is not None and self._shape.experts is not None:
                _check_experts(rollout.routed_experts, self._shape)
        return rollout


def _check_experts(routed: RoutedExperts, shape: ModelShape) -> None:
    assert shape.experts is not None
    count, top_k = shape.experts.count, shape.experts.top_k
    if routed.shape[1] < shape.layers or routed.shape[2] != top_k:
        text = f"routed experts of {routed.shape[1]} layers x {routed.shape[2]}"
        raise RolloutError(f"{text}, but the model has {shape.layers} x {top_k}")
    beyond = routed[:, : shape.layers] >= count
    # a token of which nothing is known has the dtype's largest value everywhere
    if beyond.any() and not (beyond.all(axis=(1, 2)) == beyond.any(axis=(1, 2))).all():
        raise RolloutError(f"routed experts beyond the {count} that there are")


def _shape(model: str) -> ModelShape | None:
    directory = model_directory(model)
    config = read_json(directory / "config.json") if directory is not None else None
    try:
        return shape_of(config) if config is not None else None
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
