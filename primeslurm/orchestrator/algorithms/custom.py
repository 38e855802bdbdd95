"""A user's own algorithm: imported by its path, and checked at every call."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from primeslurm.base.errors import UsageError, Violation
from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, Memory
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe.sections.orchestrator import CustomAlgorithm
from primeslurm.wire.batches.rollout import Rollout

T = TypeVar("T")

FIELD = "orchestrator.algorithm.function"
_COUNTER_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Custom(Algorithm):
    """Calls a user's algorithm. Every method raises UsageError if the algorithm raises or returns something invalid."""

    def __init__(self, name: str, inner: Algorithm) -> None:
        self._name = name
        self._inner = inner

    @property
    def needs_teacher(self) -> bool:
        return bool(self._inner.needs_teacher)

    @property
    def needs_observed(self) -> bool:
        return bool(self._inner.needs_observed)

    def rejects(self, group: RolloutGroup) -> str | None:
        reason = self._call("rejects", lambda: self._inner.rejects(group))
        if reason is not None and not (isinstance(reason, str) and _COUNTER_NAME.fullmatch(reason)):
            raise self._error(f"rejects(group {group.id}) returned {reason!r}", "return None, or a word like too_long")
        return reason

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        updated = self._call("remember", lambda: self._inner.remember(memory, groups))
        if not _is_memory(updated):
            raise self._error(f"remember returned {updated!r}", "return a dict of names to finite numbers")
        return updated

    def recalling(self, memory: Memory) -> Custom:
        algorithm = self._call("recalling", lambda: self._inner.recalling(memory))
        if not isinstance(algorithm, Algorithm):
            raise self._error(f"recalling returned a {type(algorithm).__name__}", "return an Algorithm")
        return Custom(self._name, algorithm)  # calls of the returned algorithm are checked, too

    def assign(self, groups: Sequence[RolloutGroup]) -> Sequence[Sequence[Credit]]:
        credits = self._call("assign", lambda: self._inner.assign(groups))
        if fault := next(_shape_faults(groups, credits), None):
            raise self._error(
                f"assign returned {fault}", "return one list for each group, with a Credit for each sequence"
            )
        # Check the arrays here: in the trainer, a wrong shape or a NaN would end the run without naming the algorithm.
        for group, of_group in zip(groups, credits, strict=True):
            for sequence, credit in zip(group.sequences, of_group, strict=True):
                if fault := next(_credit_faults(sequence, credit), None):
                    raise self._error(f"assign returned for a sequence of rollout {sequence.info.id} {fault}")
        return credits

    def _call(self, method: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise self._error(f"{method} raised {type(error).__name__}: {error}") from error

    def _error(self, why: str, fix: str = "") -> UsageError:
        return UsageError([Violation(FIELD, self._name, why, fix)])


def load(config: CustomAlgorithm) -> Algorithm:
    """Import and construct a user's algorithm. Raises UsageError if that fails or the result is not an Algorithm."""
    module, _, name = config.function.partition(":")

    def refuse(why: str, fix: str = "") -> UsageError:
        return UsageError([Violation(FIELD, config.function, why, fix)])

    # Three steps with an error each, so that the message says what to correct.
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise refuse(f"cannot be imported: {error}") from error
    try:
        algorithm = function(**config.kwargs)
    except Exception as error:
        raise refuse(f"cannot be called with its kwargs: {type(error).__name__}: {error}") from error
    if not isinstance(algorithm, Algorithm):
        fix = "derive it from primeslurm.orchestrator.algorithms.Algorithm"
        raise refuse(f"returns a {type(algorithm).__name__}, which is not an Algorithm", fix)
    return Custom(config.function, algorithm)


def _is_memory(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(number, float | int) and math.isfinite(number)
        for name, number in value.items()
    )


def _shape_faults(groups: Sequence[RolloutGroup], credits: object) -> Iterator[str]:
    if not isinstance(credits, Sequence):
        yield f"a {type(credits).__name__}"
    elif len(credits) != len(groups):
        yield f"{len(credits)} lists for {len(groups)} groups"
    else:
        for group, of_group in zip(groups, credits, strict=True):
            if not isinstance(of_group, Sequence):
                yield f"a {type(of_group).__name__} for a group"
            elif len(of_group) != len(group.sequences):
                yield f"{len(of_group)} credits for the {len(group.sequences)} sequences of group {group.id}"


def _credit_faults(sequence: Rollout, credit: object) -> Iterator[str]:
    """Yield faults in the credit of a sequence. Later checks rely on earlier ones, so only use the first fault."""
    if not isinstance(credit, Credit):
        yield f"a {type(credit).__name__}, not a Credit"
        return
    length = len(sequence.token_ids)
    yield from _array_faults("advantages", credit.advantages, np.dtype(np.float32), length)
    yield from _array_faults("mask", credit.mask, np.dtype(np.bool_), length)
    if (credit.mask & ~sequence.mask).any():
        yield "a mask that is true for tokens that were not sampled"
    if credit.cross_entropy is None:
        return
    yield from _array_faults("cross_entropy", credit.cross_entropy, np.dtype(np.float32), length)
    if (credit.cross_entropy < 0).any():
        yield "a cross_entropy below 0"
    if (credit.mask & (credit.cross_entropy > 0)).any():
        yield "tokens with both mask and cross_entropy"


def _array_faults(name: str, array: object, dtype: np.dtype[Any], length: int) -> Iterator[str]:
    if not isinstance(array, np.ndarray):
        yield f"{name} as a {type(array).__name__}, not an array"
    elif array.dtype != dtype:
        yield f"{name} as {array.dtype}, not {dtype}"
    elif array.shape != (length,):
        yield f"{name} of shape {list(array.shape)}, not [{length}]"
    elif not np.isfinite(array).all():
        yield f"{name} with {array[~np.isfinite(array)][0]}"
