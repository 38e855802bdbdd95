"""Groups that are not complete, and what becomes of one that gets too old."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.wire.rollouts import Rollout


@dataclass
class OpenGroup:
    """A group that is not complete."""

    id: str
    environment: str
    example: int
    version: int
    router: str
    """Of the replica that its rollouts go to if there is room."""
    size: int
    """Rollouts that complete it."""
    to_dispatch: list[int]
    """Indices of rollouts that no job runs now."""
    task: int | None
    """Index in the taskset, where a curriculum has drawn it; None: what the stream has at `example`."""
    part: int = 0
    """Above 0: rollouts of an earlier group of the same example go on in it, which was completed without them."""
    jobs: dict[str, int] = field(default_factory=dict)
    """Of its rollouts that run: index by job."""
    done: dict[int, tuple[Rollout, ...]] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    finished: list[str] = field(default_factory=list)
    """Jobs whose rollouts are done."""

    def complete(self) -> RolloutGroup:
        """Return it with the rollouts that are done, in the order of their indices."""
        rollouts = tuple(self.done[index] for index in sorted(self.done))
        return RolloutGroup(self.id, self.environment, self.example, self.version, rollouts, task=self.task)

    def successor(self, part: int, version: int) -> OpenGroup:
        """Return a group of the same example that goes on with the rollouts that run. This one has none then.

        Args:
            part: what tells it apart from the groups of the example before.
            version: at which it opens.
        """
        indices = sorted(self.jobs.values())
        renumbered = {old: new for new, old in enumerate(indices)}
        jobs = {job: renumbered[index] for job, index in self.jobs.items()}
        tries = Counter({renumbered[index]: count for index, count in self.tries.items() if index in renumbered})
        rest = list(range(len(jobs), self.size))
        name = group_id(self.environment, self.example, part)
        self.jobs = {}
        return OpenGroup(
            *(name, self.environment, self.example, version, self.router, self.size, rest, self.task, part),
            jobs=jobs,
            tries=tries,
        )


def group_id(label: str, example: int, part: int = 0) -> str:
    """Return the id of a group: the same after a restart."""
    return f"{label}-{example:08d}" + (f".{part}" if part else "")
