"""Which example comes next in the stream of each environment, and which come again: a pure state machine.

An environment's examples are positions in a stream; its cursor is the next one. Positions before it whose groups never
finished come first. Those of groups that were given up are among them, once: examples whose rollouts take longer than
the bound on staleness would come again for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from primeslurm.orchestrator.dispatch.group_queues import group_id

Position = tuple[str, int]
"""Label of an environment, and a position in its stream."""


class Draws(Protocol):
    """Says which task an environment's next group is of."""

    def draw(self, label: str, position: int, running: Collection[int]) -> int | None:
        """Draw a task.

        Args:
            label: of the environment.
            position: of the group in the environment's stream.
            running: tasks of its open groups.

        Returns:
            The task's index in the taskset; None: the one that the stream has at `position`.
        """
        ...


class Examples:
    """See the module docstring.

    Args:
        ratios: labels of the environments, and the share of groups that each gets.
        cursors: next position in each environment's stream.
        unfinished: positions before the cursors whose groups never finished.
        taken: ids of groups that exist already (finished or trained) and must not be opened again.
        draws: of the tasks that groups are of; each environment's own order without it.
        drawn: tasks of the unfinished groups, by group id.
        returned: positions that were given up once, and are not again.
    """

    def __init__(
        self,
        ratios: Mapping[str, float],
        *,
        cursors: Mapping[str, int] | None = None,
        unfinished: Iterable[Position] = (),
        taken: Collection[str] = (),
        draws: Draws | None = None,
        drawn: Mapping[str, int] | None = None,
        returned: Iterable[Position] = (),
    ) -> None:
        self.cursors = {label: (cursors or {}).get(label, 0) for label in ratios}
        self.unfinished = [position for position in unfinished if position[0] in ratios]
        self.taken = set(taken)
        self.drawn = dict(drawn or {})
        self._ratios = ratios
        self._draws = draws
        self._returned = set(returned)
        self._returned_in_batches = self._returned_of(self.taken)
        """Those with a group in the batch of a step that is not committed: a resumed run forms that batch anew."""

    def take_next(self, labels: Sequence[str]) -> Position | None:
        """Take the position that the next group is of.

        Args:
            labels: of the environments that may have a group now.

        Returns:
            None if there are none.
        """
        for position in [position for position in self.unfinished if position[0] in labels]:
            self.unfinished.remove(position)
            if group_id(*position) not in self.taken:
                return position
            self.drawn.pop(group_id(*position), None)
        if not labels:
            return None
        # the environment that is furthest behind its share
        label = min(labels, key=lambda name: (self.cursors[name] + 1) / self._ratios[name])
        while group_id(label, self.cursors[label]) in self.taken:
            self.cursors[label] += 1
        self.cursors[label] += 1
        return label, self.cursors[label] - 1

    def take_task(self, position: Position, running: Iterable[int | None]) -> int | None:
        """Take the task of a position that was given up, or draw one.

        Args:
            position: as `take_next` said.
            running: tasks of the environment's open groups, of those that have one.

        Returns:
            As `Draws.draw`.
        """
        task = self.drawn.pop(group_id(*position), None)
        if task is None and self._draws is not None:
            task = self._draws.draw(*position, {other for other in running if other is not None})
        return task

    def is_unopened(self, position: Position) -> bool:
        """Tell whether no group was opened for a position, as far as is known."""
        label, example = position
        if group_id(*position) in self.taken:
            return False
        return example >= self.cursors[label] or position in self.unfinished

    def mark_opened(self, position: Position) -> None:
        """Note that there is a group of a position, wherever the cursor is. What is before it is to come.

        The example would come again otherwise, once its group is trained and forgotten.
        """
        label, example = position
        cursor = self.cursors[label]
        self.unfinished += [(label, passed) for passed in range(cursor, example)]
        self.cursors[label] = max(cursor, example + 1)
        if position in self.unfinished:
            self.unfinished.remove(position)

    def come_again(self, position: Position, task: int | None) -> bool:
        """Have an example sampled again whose group was given up. Returns whether that was not known already."""
        if position in self.unfinished:
            return False
        self.taken.discard(group_id(*position))
        self.unfinished.append(position)
        self._returned.add(position)
        if task is not None:
            self.drawn[group_id(*position)] = task
        return True

    def was_returned(self, position: Position) -> bool:
        """Tell whether an example came again."""
        return position in self._returned

    def returned(self, known: Collection[Position]) -> list[Position]:
        """Return the examples that came again and are in no committed step, or with a part of them alone.

        Args:
            known: examples of the groups that are in no batch.
        """
        return sorted(self._returned & {*self.unfinished, *known} | self._returned_in_batches)

    def put_in_batch(self, names: Collection[str]) -> None:
        """Note which groups are in a batch, by id."""
        self._returned_in_batches |= self._returned_of(names)

    def forget_batch(self, names: Collection[str]) -> None:
        """Note that a batch was taken back, or that its step is committed: its groups are in none any more."""
        self._returned_in_batches -= self._returned_of(names)

    def position_of_file(self, name: str) -> Position | None:
        """Find what is to be sampled again for a group of which nothing is known but its file's name; None: nothing."""
        label, _, example = name.rpartition("-")
        label = next((each for each in self.cursors if each.replace("/", "_") == label.replace("/", "_")), "")
        if not label or not example.isdecimal() or int(example) >= self.cursors[label]:  # that is to come anyway
            return None
        return label, int(example)

    def _returned_of(self, names: Collection[str]) -> set[Position]:
        """The examples that came again of some groups. Parts of them need none of it: they go on in any case."""
        return {position for position in self._returned if group_id(*position) in names}
