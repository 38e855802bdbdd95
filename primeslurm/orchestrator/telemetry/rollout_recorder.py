"""Writes a sample of rollouts to the archive of the run, `rollouts/archive/`, for people to read.

A thread encodes and writes them. Nothing waits for it: if it is behind, or the disk is full, rollouts are left out of
the archive and counted. The rollouts themselves are not affected.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from primeslurm.base import durable, files
from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.transcripts import Credited
from primeslurm.recipe.sections.monitor import KeptRollouts
from primeslurm.records import rollout_files
from primeslurm.records.metrics import Row
from primeslurm.records.rollout_files import FileName, StoredRollout
from primeslurm.records.rollouts import RolloutSummary
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import DamagedError

log = logging.getLogger(__name__)

# Rollouts of the same group that are kept of a step at first, so that they can be compared.
PER_GROUP = 4
# Rollouts of an evaluation in one file. More would wait in memory for long.
PER_FILE = 32
# Files that may wait to be written.
MAX_WAITING = 8
# How long an operation of an unavailable file system is retried [s].
RETRY_S = 5.0


class _Kept(NamedTuple):
    """A rollout that is to be written. Its arrays are copies."""

    rollout: tuple[Rollout, ...]  # empty if it failed
    facts: Mapping[str, Any]  # fields of its summary
    credits: Sequence[Credited] | None = None


class RolloutRecorder:
    """Selects rollouts and writes them. All methods may be called from any thread, and return at once.

    Args:
        step: returns the step whose batch is formed next.
    """

    def __init__(self, run_dir: Path, attempt: int, options: KeptRollouts, step: Callable[[], int]) -> None:
        self._directory = run_dir / rollout_files.DIRECTORY
        self._attempt, self._options, self._step = attempt, options, step
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "rollout-archive")
        self._waiting = 0
        self._batches: set[int] = set()
        self._dropped: list[_Kept] = []
        self._evaluated: dict[int, list[_Kept]] = {}
        # Dropped and failed rollouts that were kept since the last batch was formed.
        self._budget_step = -1
        self._used = {"dropped": 0, "failed": 0}
        self._counts = {"kept": 0, "left_out": 0}
        # Sizes of all files [bytes]. Only the thread uses it; None before its first file.
        self._sizes: dict[FileName, int] | None = None

    def batch(self, step: int, groups: Sequence[RolloutGroup], credits: Sequence[Credited]) -> list[int]:
        """Keep a sample of a batch, and what was dropped before it. Keeps nothing if the step was kept before.

        Args:
            credits: one for each sequence of the groups, in their order.

        Returns:
            The indices of the sequences of the sample, always the same for the same batch.
        """
        rollouts = [(group, one) for group in groups for one in group.rollouts]
        chosen = _sample([group.id for group, _ in rollouts], self._options.per_step, random.Random(step))
        ends = list(accumulate(len(one) for _, one in rollouts))
        numbers = {index: range(ends[index] - len(rollouts[index][1]), ends[index]) for index in chosen}
        with self._lock:
            is_new = step not in self._batches
            self._batches.add(step)
        if is_new:
            kept = []
            for index, sequences in numbers.items():
                group, rollout = rollouts[index]
                copies = [Credited(credits[i].mask.copy(), credits[i].advantages.copy(), i) for i in sequences]
                kept.append(_Kept(_copied(rollout), self._facts(group, "trained", step), copies))
            self._flush_dropped()
            self._submit(step, "batch", kept)
        return [number for sequences in numbers.values() for number in sequences]

    def dropped(self, group: RolloutGroup, reasons: Mapping[str, str]) -> None:
        """Keep rollouts of a group that are not trained. `reasons`: why, by rollout id."""
        for rollout in group.rollouts:
            if (reason := reasons.get(rollout[0].info.id)) and self._may_keep("dropped"):
                facts = self._facts(group, "dropped", self._step()) | {"dropped": reason}
                self._add_dropped(_Kept(_copied(rollout), facts))

    def failed(self, id: str, error: str, **facts: Any) -> None:
        """Keep why a rollout failed. `facts`: its group, environment, example and task."""
        if self._may_keep("failed"):
            facts |= {"id": id, "state": "failed", "step": self._step(), "attempt": self._attempt}
            self._add_dropped(_Kept((), facts | {"error": transcripts.printable(error)}))

    def evaluated(self, step: int, rollout: tuple[Rollout, ...], error: str, **facts: Any) -> None:
        """Keep a rollout of an evaluation. If all tries failed, it is empty, and `facts` has its id and group."""
        if not self._options.evaluations:
            return
        state = "failed" if error else "evaluated"
        facts |= {"state": state, "step": step, "attempt": self._attempt, "evaluation": True}
        facts["error"] = transcripts.printable(error)
        with self._lock:
            pending = self._evaluated.setdefault(step, [])
            pending.append(_Kept(_copied(rollout), facts))
            is_full = len(pending) >= PER_FILE
        if is_full:
            self.flush_evaluation(step)

    def flush_evaluation(self, step: int) -> None:
        """Write the rollouts of an evaluation that wait for more."""
        with self._lock:
            kept = self._evaluated.pop(step, [])
        self._submit(step, "evaluation", kept)

    def take_metrics(self) -> Row:
        """Return the number of rollouts since the last row that were kept, and that could not be."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {"rollouts/archive_kept": float(counts["kept"]), "rollouts/archive_left_out": float(counts["left_out"])}

    def close(self) -> None:
        """Write what waits. The process exits once it is written, or given up."""
        self._flush_dropped()
        for step in list(self._evaluated):
            self.flush_evaluation(step)
        self._thread.shutdown(wait=False)

    def _facts(self, group: RolloutGroup, state: str, step: int) -> dict[str, Any]:
        facts = {"state": state, "step": step, "attempt": self._attempt}
        return facts | {"example": group.example, "task": group.task}

    def _may_keep(self, kind: str) -> bool:
        """Count one more dropped or failed rollout of this step. False if there are enough."""
        step = self._step()
        with self._lock:
            if step != self._budget_step:
                self._budget_step, self._used = step, dict.fromkeys(self._used, 0)
            if self._used[kind] >= self._options.per_step:
                return False
            self._used[kind] += 1
            return True

    def _add_dropped(self, kept: _Kept) -> None:
        with self._lock:
            self._dropped.append(kept)
            is_full = len(self._dropped) >= self._options.per_step
        if is_full:  # no batch may ever be formed, if everything is dropped
            self._flush_dropped()

    def _flush_dropped(self) -> None:
        with self._lock:
            kept, self._dropped = self._dropped, []
        if kept:
            self._submit(kept[-1].facts["step"], "dropped", kept)

    def _submit(self, step: int, kind: str, kept: Sequence[_Kept]) -> None:
        if not kept:
            return
        with self._lock:
            if self._waiting >= MAX_WAITING:
                self._counts["left_out"] += len(kept)
                return
            self._waiting += 1
        self._thread.submit(self._write, step, kind, kept)

    def _write(self, step: int, kind: str, kept: Sequence[_Kept]) -> None:
        """Write one file, in the thread."""
        try:
            with files.within(RETRY_S):
                why = self._try_write(step, kind, kept)
        except Exception as error:  # nobody looks at the thread's results
            why = f"{type(error).__name__}: {error}"
        if why:
            log.warning("%d rollouts of step %d are not in the archive: %s", len(kept), step, why)
        with self._lock:
            self._waiting -= 1
            self._counts["left_out" if why else "kept"] += len(kept)

    def _try_write(self, step: int, kind: str, kept: Sequence[_Kept]) -> str:
        """Return why the file was not written, or ""."""
        if self._sizes is None:
            durable.make_directory(self._directory)
            self._sizes = _sizes(self._directory)
        earlier = [name.number for name in self._sizes if name[:3] == (step, self._attempt, kind)]
        if earlier and kind == "batch":
            return ""  # an earlier process of this attempt has kept the step
        name = FileName(step, self._attempt, kind, max(earlier, default=-1) + 1)
        chunks = rollout_files.encode([_stored(each) for each in kept])
        path = self._directory / str(name)
        if why := durable.write_bulk(path, lambda: durable.write(path, chunks)):
            return why
        self._sizes[name] = sum(map(len, chunks)) + (_trainer_bytes(kept) if kind == "batch" else 0)
        self._remove_oldest(name)
        return ""

    def _remove_oldest(self, written: FileName) -> None:
        """Remove files until the archive has its size: those of training first, the oldest first."""
        assert self._sizes is not None
        limit = self._options.max_gb * 1e9
        for name in sorted(self._sizes, key=lambda name: (name.kind == "evaluation", name)):
            if sum(self._sizes.values()) <= limit:
                return
            if name != written:
                files.unlink(self._directory / str(name))
                if name.kind == "batch":
                    for path in files.listing(self._directory, f"{name.stem}*{rollout_files.LOGPROBS_SUFFIX}"):
                        files.unlink(path)
                del self._sizes[name]


def _sample(groups: Sequence[str], count: int, rng: random.Random) -> list[int]:
    """Return the indices of at most `count` rollouts, given the group of each: some of each of a few random groups."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    order = list(members.values())
    rng.shuffle(order)
    ranked = []
    for position, indices in enumerate(order):
        rng.shuffle(indices)
        ranked += [(place // PER_GROUP, position, index) for place, index in enumerate(indices)]
    return sorted(index for _, _, index in sorted(ranked)[:count])


def _copied(rollout: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """Copy everything but routed experts: a view would keep the whole message or file in memory."""
    copies = []
    for sequence in rollout:
        arrays = {name: array.copy() for name, array in sequence.arrays.items() if name != "routed_experts"}
        copies.append(replace(sequence, routed_experts=None, **arrays))
    return tuple(copies)


def _stored(kept: _Kept) -> tuple[RolloutSummary, StoredRollout]:
    if not kept.rollout:
        return RolloutSummary(**kept.facts), StoredRollout()
    try:
        return transcripts.stored(kept.rollout, kept.facts, kept.credits)
    except DamagedError as error:
        log.warning("the transcript of rollout %s is damaged: %s", kept.rollout[0].info.id, error)
        rollout = [replace(each, info=msgspec.structs.replace(each.info, transcript=b"")) for each in kept.rollout]
        return transcripts.stored(rollout, kept.facts, kept.credits)


def _trainer_bytes(kept: Sequence[_Kept]) -> int:
    """Return the size of the log-probabilities that trainer ranks will write for these rollouts."""
    return sum(8 * int(credit.mask.sum()) for each in kept for credit in each.credits or ())


def _sizes(directory: Path) -> dict[FileName, int]:
    """Return the size of each file, with those of the trainer's log-probabilities of its rollouts."""
    sizes: dict[FileName, int] = {}
    of_trainer: dict[str, int] = {}
    for path in files.listing(directory):
        size = about.st_size if (about := files.status(path)) is not None else 0
        if (name := rollout_files.parse_name(path.name)) is not None:
            sizes[name] = size
        elif stem := rollout_files.logprobs_stem(path.name):
            of_trainer[stem] = of_trainer.get(stem, 0) + size
    return {name: size + (of_trainer.get(name.stem, 0) if name.kind == "batch" else 0) for name, size in sizes.items()}
