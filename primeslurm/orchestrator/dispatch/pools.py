"""Examples of one environment by how often the policy solves them, and which of them is next. Pure.

What is drawn depends on the seed, the position in the stream, and what was learned before: the same after a restart.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from primeslurm.orchestrator.dispatch.task_order import ENDLESS_WINDOW, WINDOW, first_epoch
from primeslurm.recipe.sections.curriculum import Curriculum

UNSEEN = "unseen"
DRAWN_FROM = ("easy", "normal", "hard")
RETIRED = ("solved", "failed")


@dataclass
class _Example:
    rate: float
    solved: int = 0
    """Groups in a row that solved it throughout."""
    failed: int = 0
    """Groups in a row that never solved it."""
    pool: str = ""
    place: int = 0
    """In its pool."""


class Pools:
    """See the module docstring.

    Args:
        options: of the recipe.
        seed: of the run and the environment.
        order: seed of the order in which unseen examples come; None: in that of the taskset.
        fresh: how many of them came before.
    """

    def __init__(self, options: Curriculum, seed: str, order: int | None, fresh: int = 0) -> None:
        self.fresh = fresh
        self.drawn: Counter[str] = Counter()
        """Draws by pool."""
        self._options = options
        self._seed = seed
        self._order = order
        self.tasks: int | None = None
        """How many there are. None: no end of them is known."""
        self._examples: dict[int, _Example] = {}
        self._members: dict[str, list[int]] = {name: [] for name in (*DRAWN_FROM, *RETIRED)}

    @property
    def sizes(self) -> dict[str, int]:
        """Return how many examples each pool has; `unseen` is there if it is known."""
        sizes = {name: len(members) for name, members in self._members.items()}
        return sizes if self.tasks is None else {UNSEEN: self.tasks - len(self._examples), **sizes}

    def set_tasks(self, tasks: int) -> None:
        """Note how many tasks there are."""
        if tasks == self.tasks:
            return
        self.tasks = tasks
        for gone in [task for task in self._examples if task >= tasks]:
            self._leave(self._examples.pop(gone))

    def learn(self, task: int, solved: float) -> None:
        """Note which share of a group of rollouts has solved an example."""
        example = self._examples.get(task)
        if example is None:
            example = self._examples[task] = _Example(rate=solved)
        else:
            self._leave(example)
            example.rate += self._options.alpha * (solved - example.rate)
        example.solved = example.solved + 1 if solved == 1 else 0
        example.failed = example.failed + 1 if solved == 0 else 0
        example.pool = self._pool(example)
        example.place = len(self._members[example.pool])
        self._members[example.pool].append(task)

    def draw(self, position: int, running: Collection[int]) -> int:
        """Draw the example of the group at a position of the stream; none of those that run, if there are others."""
        source = random.Random(f"{self._seed}/{position}")
        for names in ((UNSEEN, *DRAWN_FROM), RETIRED):
            shares = {name: self._share(name) for name in names if self._has_other(name, running)}
            if shares:
                weights = list(shares.values()) if any(shares.values()) else None
                (name,) = source.choices(list(shares), weights)
                self.drawn[name] += 1
                return self._unseen(running) if name == UNSEEN else self._member(name, running, source)
        return source.randrange(self.tasks or 1)

    def _share(self, name: str) -> float:
        return 1.0 if name in RETIRED else float(getattr(self._options.shares, name))

    def _has_other(self, name: str, running: Collection[int]) -> bool:
        if name == UNSEEN:
            under_way = sum(task not in self._examples for task in running)
            return self.tasks is None or len(self._examples) + under_way < self.tasks
        members = self._members[name]
        return len(members) > len(running) or any(task not in running for task in members)

    def _unseen(self, running: Collection[int]) -> int:
        """The next one in order. Those whose groups were dropped come again when the others are through."""
        while True:
            position = self.fresh if self.tasks is None else self.fresh % self.tasks
            window = WINDOW if self.tasks is not None else ENDLESS_WINDOW
            task = position if self._order is None else first_epoch(position, self._order, window, self.tasks)
            self.fresh += 1
            if task not in self._examples and task not in running:
                return task

    def _member(self, name: str, running: Collection[int], source: random.Random) -> int:
        members = self._members[name]
        place = source.randrange(len(members))
        while members[place] in running:
            place = (place + 1) % len(members)
        return members[place]

    def _pool(self, example: _Example) -> str:
        options = self._options
        if options.retire_solved and example.solved >= options.retire_solved:
            return "solved"
        if options.retire_failed and example.failed >= options.retire_failed:
            return "failed"
        if example.rate >= options.easy:
            return "easy"
        return "hard" if example.rate <= options.hard else "normal"

    def _leave(self, example: _Example) -> None:
        """Take an example out of its pool; the pool's last one gets its place."""
        members = self._members[example.pool]
        last = members.pop()
        if example.place < len(members):
            members[example.place] = last
            self._examples[last].place = example.place
