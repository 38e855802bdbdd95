"""Which steps are evaluated: pure."""

from __future__ import annotations

from collections.abc import Iterable

from primeslurm.recipe import Recipe


class Schedule:
    """Steps that are due, and those that are settled: evaluated, or given up.

    Args:
        recipe: of the run; without `evaluation` nothing is ever due.
        settled: steps that are settled already.
    """

    def __init__(self, recipe: Recipe, settled: Iterable[int] = ()) -> None:
        self._evaluation = recipe.evaluation
        self._last = recipe.max_steps
        self._alone = recipe.task == "eval"
        self.settled = set(settled)

    def all_due(self, version: int) -> list[int]:
        """List the steps up to a policy version that are to be evaluated at some time, ascending."""
        if self._evaluation is None or version < 0:
            return []
        if self._alone:
            return [0]
        first = [0] if self._evaluation.at_start else []
        steps = [*first, *range(self._evaluation.interval, self._last, self._evaluation.interval), self._last]
        return [step for step in steps if step <= version]

    def owing(self, version: int) -> list[int]:
        """List the steps that are due at a policy version and not settled, ascending.

        What comes before a settled step is settled, too: its policy is gone. The model before the first step is
        evaluated at version 0 or not at all.
        """
        newest = max(self.settled, default=-1)
        return [step for step in self.all_due(version) if step > newest and (step or not version)]
