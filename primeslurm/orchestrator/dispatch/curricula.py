"""Curricula: choose examples by how often the policy solves them.

Each environment with a `curriculum` sorts its examples into pools by difficulty (`DifficultyPools`). The outcome of
each complete group is appended to a file, so that recording a step costs the same with a hundred thousand examples as
with ten. `RunProgress` records how many bytes of the file count; the rest was undone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from primeslurm.base import durable, files
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.task_order import ENDLESS_WINDOW, WINDOW, first_epoch
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.curriculum import Curriculum
from primeslurm.records.metrics import Row
from primeslurm.wire.decoding import DamagedError, decode_json

log = logging.getLogger(__name__)

# In the run directory: one line [group id, task index, share of its rollouts that solved it] per complete group.
OUTCOMES = "rollouts/outcomes.jsonl"
Outcome = tuple[str, int, float]
UNSEEN = "unseen"
DRAWN_FROM = ("easy", "normal", "hard")
RETIRED = ("solved", "failed")


@dataclass
class _Example:
    rate: float  # Moving average of the share of rollouts that solve it
    solved: int = 0  # Consecutive groups that all solved it
    failed: int = 0  # Consecutive groups that never solved it
    pool: str = ""
    index: int = 0  # Index in its pool


class DifficultyPools:
    """The examples of one environment, by difficulty. Pure.

    A draw depends on the seed, the position in the stream, and the outcomes so far, so it is the same after a restart.

    Args:
        seed: Seed of the run and the environment.
        order: Seed of the order of unseen examples. None: the order of the taskset.
        fresh: Number of unseen examples that were drawn before.
    """

    def __init__(self, options: Curriculum, seed: str, order: int | None, fresh: int = 0) -> None:
        self.fresh = fresh
        # Draws by pool
        self.drawn: Counter[str] = Counter()
        # Size of the taskset. None: unknown, or endless.
        self.tasks: int | None = None
        self._options = options
        self._seed = seed
        self._order = order
        self._examples: dict[int, _Example] = {}
        self._members: dict[str, list[int]] = {name: [] for name in (*DRAWN_FROM, *RETIRED)}

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of examples in each pool; of `unseen` only if it is known."""
        sizes = {name: len(members) for name, members in self._members.items()}
        return sizes if self.tasks is None else {UNSEEN: self.tasks - len(self._examples), **sizes}

    def set_tasks(self, tasks: int) -> None:
        if tasks == self.tasks:
            return
        self.tasks = tasks
        for removed in [task for task in self._examples if task >= tasks]:
            self._leave(self._examples.pop(removed))

    def learn(self, task: int, solved: float) -> None:
        """Add the share of a group's rollouts that solved an example."""
        example = self._examples.get(task)
        if example is None:
            example = self._examples[task] = _Example(rate=solved)
        else:
            self._leave(example)
            example.rate += self._options.alpha * (solved - example.rate)
        example.solved = example.solved + 1 if solved == 1 else 0
        example.failed = example.failed + 1 if solved == 0 else 0
        example.pool = self._pool_of(example)
        example.index = len(self._members[example.pool])
        self._members[example.pool].append(task)

    def draw(self, position: int, running: Collection[int]) -> int:
        """Draw the example of the group at a position; not a running one if there are others."""
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
            running_unseen = sum(task not in self._examples for task in running)
            return self.tasks is None or len(self._examples) + running_unseen < self.tasks
        members = self._members[name]
        return len(members) > len(running) or any(task not in running for task in members)

    def _unseen(self, running: Collection[int]) -> int:
        # Wraps around: unseen examples whose groups were dropped come again after the others.
        while True:
            position = self.fresh if self.tasks is None else self.fresh % self.tasks
            window = WINDOW if self.tasks is not None else ENDLESS_WINDOW
            task = position if self._order is None else first_epoch(position, self._order, window, self.tasks)
            self.fresh += 1
            if task not in self._examples and task not in running:
                return task

    def _member(self, name: str, running: Collection[int], source: random.Random) -> int:
        members = self._members[name]
        index = source.randrange(len(members))
        while members[index] in running:
            index = (index + 1) % len(members)
        return members[index]

    def _pool_of(self, example: _Example) -> str:
        options = self._options
        if options.retire_solved and example.solved >= options.retire_solved:
            return "solved"
        if options.retire_failed and example.failed >= options.retire_failed:
            return "failed"
        if example.rate >= options.easy:
            return "easy"
        return "hard" if example.rate <= options.hard else "normal"

    def _leave(self, example: _Example) -> None:
        # The last member takes the free index, so that leaving costs the same in a pool of any size.
        members = self._members[example.pool]
        last = members.pop()
        if example.index < len(members):
            members[example.index] = last
            self._examples[last].index = example.index


class Curricula:
    """The pools of all environments that have a curriculum, and the file of outcomes.

    Args:
        size: Bytes of the file that count.
        fresh: Number of unseen examples drawn so far, by environment label.
    """

    def __init__(self, recipe: Recipe, path: Path, size: int = 0, fresh: Mapping[str, int] | None = None) -> None:
        self._path = path
        self._bytes = size
        self._unwritten = b""
        self._groups: set[str] = set()
        self._solved_reward = {each.label: each.solved_reward for each in recipe.environments}
        self._pools = {
            each.label: DifficultyPools(
                each.curriculum,
                f"{recipe.seed}/{each.label}",
                recipe.seed if each.shuffle else None,
                (fresh or {}).get(each.label, 0),
            )
            for each in recipe.environments
            if each.curriculum is not None
        }
        for outcome in _read(path, size):
            self._learn(outcome)

    @property
    def fresh(self) -> dict[str, int]:
        return {label: pools.fresh for label, pools in self._pools.items()}

    @property
    def tasks(self) -> dict[str, int]:
        return {label: pools.tasks for label, pools in self._pools.items() if pools.tasks is not None}

    def set_tasks(self, tasks: Mapping[str, int]) -> None:
        for label in tasks.keys() & self._pools.keys():
            self._pools[label].set_tasks(tasks[label])

    def draw(self, label: str, position: int, running: Collection[int]) -> int | None:
        return self._pools[label].draw(position, running) if label in self._pools else None

    def learn(self, group: RolloutGroup) -> None:
        """Learn the outcome of a complete group, once."""
        if group.task is None or group.environment not in self._pools or group.id in self._groups:
            return
        rewards, threshold = group.given_rewards, self._solved_reward[group.environment]
        outcome = (group.id, group.task, sum(reward >= threshold for reward in rewards) / len(rewards))
        self._learn(outcome)
        self._unwritten += msgspec.json.encode(outcome) + b"\n"

    async def flush(self) -> int:
        """Write new outcomes in a thread, and return how many bytes of the file count. Calls must not overlap."""
        # Outcomes that are learned during the write do not count yet. After a full disk, the next call tries again.
        if content := self._unwritten:
            try:
                await asyncio.to_thread(self._append, content)
            except OSError as error:
                log.warning("%d bytes of outcomes cannot be written: %s", len(content), error)
            else:
                self._bytes += len(content)
                self._unwritten = self._unwritten[len(content) :]
        return self._bytes

    def take_metrics(self) -> Row:
        """Return the pool sizes, and the draws since the last row."""
        row: Row = {}
        for label, pools in self._pools.items():
            row |= {f"env/{label}/pool/{name}": float(size) for name, size in pools.sizes.items()}
            row |= {f"env/{label}/drawn/{name}": float(count) for name, count in pools.drawn.items()}
            pools.drawn.clear()
        return row

    def _append(self, content: bytes) -> None:
        def once() -> None:
            self._path.touch()
            with self._path.open("r+b") as file:
                file.truncate(self._bytes)
                file.seek(self._bytes)
                file.write(content)
            # The directory is flushed with the progress record that counts these bytes.
            durable.sync(self._path)

        files.retrying(self._path, once)

    def _learn(self, outcome: Outcome) -> None:
        group, task, solved = outcome
        self._groups.add(group)
        if (pools := self._pools.get(group.rpartition("-")[0])) is not None:
            pools.learn(task, solved)


def _read(path: Path, size: int) -> Iterable[Outcome]:
    if not size:
        return
    try:
        content = files.reading(path, lambda file: file.read(size))
    except FileNotFoundError as error:
        log.error("outcomes are lost, and all examples count as unseen: %s", error)
        return
    if len(content) < size:
        log.error("%s has %d of %d bytes: the newest outcomes are lost", path, len(content), size)
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        try:
            yield decode_json(line, Outcome)  # type: ignore[arg-type]  # a tuple of types is no type
        except DamagedError as error:
            log.error("an outcome is damaged, and lost: %s", error)
