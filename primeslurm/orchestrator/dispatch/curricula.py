"""The pools of all environments that have a curriculum, and what they learned on disk.

Each finished group adds a line to a file, so that a step costs as much to record with a hundred thousand examples as
with ten. A record of progress says how many bytes of the file it knows; what follows was undone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from primeslurm.base import durable, files
from primeslurm.orchestrator.dispatch.pools import Pools
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.records.metrics import Row
from primeslurm.wire.decoding import DamagedError, decode_json

log = logging.getLogger(__name__)

OUTCOMES = "rollouts/outcomes.jsonl"
"""In the run directory: [group, index of the task, share of its rollouts that solved it] of each finished group."""
Outcome = tuple[str, int, float]


class Curricula:
    """See the module docstring.

    Args:
        recipe: of the run.
        path: of the outcomes.
        known: bytes of them that count.
        fresh: how many unseen examples were drawn of each environment.
    """

    def __init__(self, recipe: Recipe, path: Path, known: int = 0, fresh: Mapping[str, int] | None = None) -> None:
        self._path = path
        self._bytes = known
        self._unwritten = b""
        self._groups: set[str] = set()
        self._solved = {each.label: each.solved_reward for each in recipe.environments}
        self._pools = {
            each.label: Pools(
                each.curriculum,
                f"{recipe.seed}/{each.label}",
                recipe.seed if each.shuffle else None,
                (fresh or {}).get(each.label, 0),
            )
            for each in recipe.environments
            if each.curriculum is not None
        }
        for outcome in _read(path, known):
            self._learn(outcome)

    @property
    def fresh(self) -> dict[str, int]:
        """Return how many unseen examples were drawn of each environment."""
        return {label: pools.fresh for label, pools in self._pools.items()}

    @property
    def tasks(self) -> dict[str, int]:
        """Return how many tasks environments have, where that is known."""
        return {label: pools.tasks for label, pools in self._pools.items() if pools.tasks is not None}

    def set_tasks(self, tasks: Mapping[str, int]) -> None:
        """Note how many tasks environments have, by label."""
        for label in tasks.keys() & self._pools.keys():
            self._pools[label].set_tasks(tasks[label])

    def draw(self, label: str, position: int, running: Collection[int]) -> int | None:
        """See `examples.Draws`."""
        return self._pools[label].draw(position, running) if label in self._pools else None

    def learn(self, group: RolloutGroup) -> None:
        """Note what became of a complete group. One that is known already is ignored."""
        if group.task is None or group.environment not in self._pools or group.id in self._groups:
            return
        rewards, least = group.given_rewards, self._solved[group.environment]
        outcome = (group.id, group.task, sum(reward >= least for reward in rewards) / len(rewards))
        self._learn(outcome)
        self._unwritten += msgspec.json.encode(outcome) + b"\n"

    async def flush(self) -> int:
        """Write what was learned since the last time, in a thread. No second one may begin meanwhile.

        Returns:
            How many bytes of the file count: nothing that is learned meanwhile. What a full disk did not take is tried
            again the next time.
        """
        if learned := self._unwritten:
            try:
                await asyncio.to_thread(self._append, learned)
            except OSError as error:
                log.warning("%d bytes of outcomes are not on disk: %s", len(learned), error)
            else:
                self._bytes += len(learned)
                self._unwritten = self._unwritten[len(learned) :]
        return self._bytes

    def take_metrics(self) -> Row:
        """Compute the sizes of pools, and how often each was drawn from since the last row."""
        row: Row = {}
        for label, pools in self._pools.items():
            row |= {f"env/{label}/pool/{name}": float(size) for name, size in pools.sizes.items()}
            row |= {f"env/{label}/drawn/{name}": float(count) for name, count in pools.drawn.items()}
            pools.drawn.clear()
        return row

    def _append(self, learned: bytes) -> None:
        def once() -> None:
            self._path.touch()
            with self._path.open("r+b") as file:
                file.truncate(self._bytes)
                file.seek(self._bytes)
                file.write(learned)
            durable.sync(self._path)  # its name with the record that counts its bytes, in the same directory

        files.retrying(self._path, once)

    def _learn(self, outcome: Outcome) -> None:
        group, task, solved = outcome
        self._groups.add(group)
        if (pools := self._pools.get(group.rpartition("-")[0])) is not None:
            pools.learn(task, solved)


def _read(path: Path, known: int) -> Iterable[Outcome]:
    if not known:
        return ()
    try:
        content = files.reading(path, lambda file: file.read(known))
    except FileNotFoundError as error:
        log.error("what was learned of examples is lost, and pools begin anew: %s", error)
        return ()
    if len(content) < known:
        log.error("%s has %d of %d bytes: the newest outcomes are lost", path, len(content), known)
    return _read_lines(content[: content.rfind(b"\n") + 1])


def _read_lines(content: bytes) -> Iterator[Outcome]:
    """The outcomes of whole lines. One that is damaged is lost, and no other."""
    for line in content.splitlines():
        try:
            yield decode_json(line, Outcome)  # type: ignore[arg-type]  # a tuple of types is no type
        except DamagedError as error:
            log.error("what was learned of an example is lost: %s", error)
