"""An algorithm of the user's own: found by its import path, and held to what an algorithm returns."""

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
_WORD = re.compile(r"[a-z][a-z0-9_]*")


class Custom(Algorithm):
    """Asks a user's algorithm, and believes none of its answers.

    Raises:
        UsageError: from every method, with the algorithm's name: it raised an error, or its answer is none.
    """

    def __init__(self, name: str, inner: Algorithm) -> None:
        self._name = name
        self._inner = inner

    @property
    def needs_teacher(self) -> bool:
        """Ask the user's algorithm."""
        return bool(self._inner.needs_teacher)

    @property
    def needs_observed(self) -> bool:
        """Ask the user's algorithm."""
        return bool(self._inner.needs_observed)

    def rejects(self, group: RolloutGroup) -> str | None:
        """Ask the user's algorithm.

        Raises:
            UsageError: it raised an error, or its answer is no word for a counter.
        """
        reason = self._ask("rejects", lambda: self._inner.rejects(group))
        if reason is not None and not (isinstance(reason, str) and _WORD.fullmatch(reason)):
            raise self._wrong(f"rejects(group {group.id}) returned {reason!r}", "return None, or a word like too_long")
        return reason

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        """Ask the user's algorithm.

        Raises:
            UsageError: it raised an error, or its answer is no mapping of names to finite numbers.
        """
        found = self._ask("remember", lambda: self._inner.remember(memory, groups))
        if not _is_memory(found):
            raise self._wrong(f"remember returned {found!r}", "return a dict of names to finite numbers")
        return found

    def recalling(self, memory: Memory) -> Custom:
        """Have the user's algorithm recall.

        Raises:
            UsageError: it raised an error, or its answer is no algorithm.
        """
        found = self._ask("recalling", lambda: self._inner.recalling(memory))
        if not isinstance(found, Algorithm):
            raise self._wrong(f"recalling returned a {type(found).__name__}", "return an Algorithm")
        return Custom(self._name, found)

    def assign(self, groups: Sequence[RolloutGroup]) -> Sequence[Sequence[Credit]]:
        """Ask the user's algorithm.

        Raises:
            UsageError: it raised an error, or its answer is not one fitting `Credit` for each sequence of each group.
        """
        found = self._ask("assign", lambda: self._inner.assign(groups))
        if fault := next(_misfits(groups, found), None):
            raise self._wrong(f"assign returned {fault}", "return a list for each group, of a Credit for each sequence")
        for group, mine in zip(groups, found, strict=True):
            for sequence, credit in zip(group.sequences, mine, strict=True):
                if fault := next(_faults(sequence, credit), None):
                    raise self._wrong(f"assign returned for a sequence of rollout {sequence.info.id} {fault}")
        return found

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise self._wrong(f"{what} raised {type(error).__name__}: {error}") from error

    def _wrong(self, why: str, fix: str = "") -> UsageError:
        return UsageError([Violation(FIELD, self._name, why, fix)])


def load(config: CustomAlgorithm) -> Algorithm:
    """The algorithm at an import path.

    Raises:
        UsageError: there is nothing there, it does not take these arguments, or makes no algorithm of them.
    """
    module, _, name = config.function.partition(":")

    def refused(why: str, fix: str = "") -> UsageError:
        return UsageError([Violation(FIELD, config.function, why, fix)])

    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise refused(f"cannot be imported: {error}") from error
    try:
        made = function(**config.kwargs)
    except Exception as error:
        raise refused(f"cannot be called with its kwargs: {type(error).__name__}: {error}") from error
    if not isinstance(made, Algorithm):
        fix = "derive it from primeslurm.orchestrator.algorithms.Algorithm"
        raise refused(f"makes a {type(made).__name__}, which is no Algorithm", fix)
    return Custom(config.function, made)


def _is_memory(found: object) -> bool:
    return isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(value, float | int) and math.isfinite(value)
        for name, value in found.items()
    )


def _misfits(groups: Sequence[RolloutGroup], found: object) -> Iterator[str]:
    """What is wrong with the numbers of credits."""
    if not isinstance(found, Sequence):
        yield f"a {type(found).__name__}"
    elif len(found) != len(groups):
        yield f"{len(found)} lists for {len(groups)} groups"
    else:
        for group, mine in zip(groups, found, strict=True):
            if not isinstance(mine, Sequence):
                yield f"a {type(mine).__name__} for a group"
            elif len(mine) != len(group.sequences):
                yield f"{len(mine)} credits for the {len(group.sequences)} sequences of group {group.id}"


def _faults(sequence: Rollout, credit: object) -> Iterator[str]:
    """What is wrong with credit for a sequence. Each fault is looked for only if those before it are not there."""
    if not isinstance(credit, Credit):
        yield f"a {type(credit).__name__}, not a Credit"
        return
    length = len(sequence.token_ids)
    yield from _of_array("advantages", credit.advantages, np.dtype(np.float32), length)
    yield from _of_array("mask", credit.mask, np.dtype(np.bool_), length)
    if (credit.mask & ~sequence.mask).any():
        yield "a mask that is true for tokens that were not sampled"
    if credit.cross_entropy is None:
        return
    yield from _of_array("cross_entropy", credit.cross_entropy, np.dtype(np.float32), length)
    if (credit.cross_entropy < 0).any():
        yield "a cross_entropy below 0"
    if (credit.mask & (credit.cross_entropy > 0)).any():
        yield "tokens with both mask and cross_entropy"


def _of_array(name: str, array: object, dtype: np.dtype[Any], length: int) -> Iterator[str]:
    if not isinstance(array, np.ndarray):
        yield f"{name} as a {type(array).__name__}, not an array"
    elif array.dtype != dtype:
        yield f"{name} as {array.dtype}, not {dtype}"
    elif array.shape != (length,):
        yield f"{name} of shape {list(array.shape)}, not [{length}]"
    elif not np.isfinite(array).all():
        yield f"{name} with {array[~np.isfinite(array)][0]}"
