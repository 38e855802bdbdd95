"""Which example comes next in the stream of each environment, and which are sampled again: a pure state machine.

The examples of an environment are positions in a stream, and its cursor is the next position. Positions before the
cursor whose groups did not finish come first. An example whose group was given up is sampled again, but only once: if
its rollouts take longer than the age limit, it would otherwise come back forever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from primeslurm.orchestrator.dispatch.curricula import Curricula
from primeslurm.orchestrator.dispatch.group_queues import group_id

# Label of an environment, and a position in its stream
Position = tuple[str, int]


class Examples:
    """The streams of all environments.

    Args:
        ratios: Share of the groups, by environment label.
        cursors: Next position in each environment's stream.
        unfinished: Positions before the cursors whose groups did not finish.
        taken: Ids of groups that exist (finished or trained) and must not be opened again.
        curricula: Choose tasks. None: each environment's own order.
        drawn: Tasks of the unfinished groups, by group id.
    """

    def __init__(
        self,
        ratios: Mapping[str, float],
        *,
        cursors: Mapping[str, int] | None = None,
        unfinished: Iterable[Position] = (),
        taken: Collection[str] = (),
        curricula: Curricula | None = None,
        drawn: Mapping[str, int] | None = None,
        returned: Iterable[Position] = (),
    ) -> None:
        self.cursors = {label: (cursors or {}).get(label, 0) for label in ratios}
        self.unfinished = [position for position in unfinished if position[0] in ratios]
        self.taken = set(taken)
        self.drawn = dict(drawn or {})
        self._ratios = ratios
        self._curricula = curricula
        self._returned = set(returned)
        # Returned examples in uncommitted batches: a resumed run forms these batches again.
        self._returned_in_batches = self._returned_of(self.taken)

    def take_next(self, labels: Sequence[str]) -> Position | None:
        """Take the position of the next group of one of the environments. None if `labels` is empty."""
        for position in [position for position in self.unfinished if position[0] in labels]:
            self.unfinished.remove(position)
            if group_id(*position) not in self.taken:
                return position
            self.drawn.pop(group_id(*position), None)
        if not labels:
            return None
        # The environment that is furthest behind its share.
        label = min(labels, key=lambda name: (self.cursors[name] + 1) / self._ratios[name])
        while group_id(label, self.cursors[label]) in self.taken:
            self.cursors[label] += 1
        self.cursors[label] += 1
        return label, self.cursors[label] - 1

    def take_task(self, position: Position, running: Iterable[int | None]) -> int | None:
        """Return the task of a position: the one that was drawn before, or a new one. See `Curricula.draw`."""
        task = self.drawn.pop(group_id(*position), None)
        if task is None and self._curricula is not None:
            task = self._curricula.draw(*position, {other for other in running if other is not None})
        return task

    def is_unopened(self, position: Position) -> bool:
        label, example = position
        if group_id(*position) in self.taken:
            return False
        return example >= self.cursors[label] or position in self.unfinished

    def mark_opened(self, position: Position) -> None:
        """Record that a group exists for a position. Positions that the cursor skips stay unfinished."""
        # Otherwise the example would be sampled again after its group is trained and forgotten.
        label, example = position
        cursor = self.cursors[label]
        self.unfinished += [(label, skipped) for skipped in range(cursor, example)]
        self.cursors[label] = max(cursor, example + 1)
        if position in self.unfinished:
            self.unfinished.remove(position)

    def sample_again(self, position: Position, task: int | None) -> bool:
        """Return an example to its stream. False if it is there already."""
        if position in self.unfinished:
            return False
        self.taken.discard(group_id(*position))
        self.unfinished.append(position)
        self._returned.add(position)
        if task is not None:
            self.drawn[group_id(*position)] = task
        return True

    def was_returned(self, position: Position) -> bool:
        return position in self._returned

    def returned(self, uncommitted: Collection[Position]) -> list[Position]:
        """Return the returned examples that no committed step has trained. `uncommitted`: groups in no batch."""
        return sorted(self._returned & {*self.unfinished, *uncommitted} | self._returned_in_batches)

    def put_in_batch(self, names: Collection[str]) -> None:
        self._returned_in_batches |= self._returned_of(names)

    def forget_batch(self, names: Collection[str]) -> None:
        """Forget the groups of a batch that was returned, or whose step is committed."""
        self._returned_in_batches -= self._returned_of(names)

    def position_of_file(self, name: str) -> Position | None:
        """Return the position of a group from its file name. None: there is nothing to sample again."""
        label, _, example = name.rpartition("-")
        # File names replace "/" of a label by "_".
        label = next((each for each in self.cursors if each.replace("/", "_") == label.replace("/", "_")), "")
        if not label or not example.isdecimal() or int(example) >= self.cursors[label]:
            return None
        return label, int(example)

    def _returned_of(self, names: Collection[str]) -> set[Position]:
        return {position for position in self._returned if group_id(*position) in names}
