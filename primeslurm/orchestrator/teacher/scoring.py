"""Scoring of complete groups: the teacher's log-probabilities of all tokens that they train."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import SpooledGroup
from primeslurm.orchestrator.teacher.client import Teacher, TeacherError, teacher_of
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.teacher import PolicyTeacher
from primeslurm.records.events.training import Stalled
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import Row
from primeslurm.wire.batches.rollout import Rollout, TeacherPrompt
from primeslurm.wire.decoding import DamagedError


class Scoring:
    """Scores groups in the order of their completion, up to `concurrency` sequences at once.

    Args:
        seq_len: Tokens after it are not trained, and not scored.
        on_scored: Called with each scored group, unless it was dropped.
        longest: Maximum number of tokens of a request. Default: seq_len.
        on_damaged: Called with a group on disk that cannot be read, and the error.
    """

    def __init__(
        self,
        teacher: Teacher,
        concurrency: int,
        seq_len: int,
        on_scored: Callable[[RolloutGroup], None],
        clock: Callable[[], float] = time.monotonic,
        longest: int | None = None,
        on_damaged: Callable[[RolloutGroup, DamagedError], None] = lambda group, error: None,
    ) -> None:
        self._teacher = teacher
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._in_progress = 0  # sequences of groups that are being scored
        self._progressed = asyncio.Event()
        self._seq_len = seq_len
        self._longest = longest or seq_len
        self._on_scored = on_scored
        self._on_damaged = on_damaged
        self._clock = clock
        self._added: asyncio.Queue[RolloutGroup] = asyncio.Queue()
        self._wanted: dict[str, asyncio.Task[None] | None] = {}  # scoring task by group; None before it starts
        self._seconds = 0.0
        self._tokens = 0
        self._unscored = 0

    def add(self, group: RolloutGroup) -> None:
        self._wanted[group.id] = None
        self._added.put_nowait(group)

    def drop(self, groups: Iterable[RolloutGroup]) -> None:
        """Stop scoring groups. Unknown groups are ignored."""
        for group in groups:
            if (task := self._wanted.pop(group.id, None)) is not None:
                task.cancel()

    async def run(self, journal: Journal) -> None:
        """Score until cancelled. If the teacher refuses, write an event and raise an ExceptionGroup of TeacherError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    group = await self._read(await self._added.get())
                    if group is not None and group.id in self._wanted:
                        self._wanted[group.id] = task = tasks.create_task(self._score(group, journal))
                        self._note_progress(len(group.sequences))
                        task.add_done_callback(functools.partial(self._note_progress, -len(group.sequences)))
        finally:
            await self._teacher.close()

    def take_metrics(self) -> Row:
        """Return the metrics since the last call.

        teacher/seconds is the sum over all requests. teacher/unasked_tokens are sampled tokens that did not fit into
        requests; for them the teacher's log-probabilities are taken to equal the policy's.
        """
        row = {
            "teacher/seconds": self._seconds,
            "teacher/tokens": float(self._tokens),
            "teacher/unasked_tokens": float(self._unscored),
            "teacher/waiting": float(len(self._wanted)),
        }
        self._seconds, self._tokens, self._unscored = 0.0, 0, 0
        return row

    def _note_progress(self, sequences: int, _task: object = None) -> None:
        self._in_progress += sequences
        self._progressed.set()

    async def _read(self, group: RolloutGroup) -> RolloutGroup | None:
        """Return a group with its arrays in memory, or None if it was dropped or is damaged."""
        if not isinstance(group, SpooledGroup):
            return group
        # Read early enough that the teacher does not wait, but not much earlier, to save memory.
        while self._in_progress >= 2 * self._concurrency:
            self._progressed.clear()
            await self._progressed.wait()
        if group.id not in self._wanted:
            return None
        try:
            return await asyncio.to_thread(group.whole)
        except DamagedError as error:
            if group.id in self._wanted:
                self._wanted.pop(group.id)
                self._on_damaged(group, error)
        return None

    async def _score(self, group: RolloutGroup, journal: Journal) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                scored = [[tasks.create_task(self._sequence(one)) for one in rollout] for rollout in group.rollouts]
        except* TeacherError as errors:
            journal.write(Stalled("teacher", str(errors.exceptions[0])))
            raise
        self._wanted.pop(group.id, None)
        rollouts = tuple(tuple(task.result() for task in rollout) for rollout in scored)
        self._on_scored(replace(group, rollouts=rollouts))

    async def _sequence(self, rollout: Rollout) -> Rollout:
        prompt = rollout.info.teacher_prompt or TeacherPrompt([], 0)
        extra = len(prompt.token_ids) - prompt.replaces
        trained = min(len(rollout.token_ids), self._seq_len)
        length = max(prompt.replaces, min(trained, self._longest - extra))
        logprobs = np.zeros(len(rollout.token_ids), np.float32)
        logprobs[length:trained] = np.where(rollout.mask, rollout.logprobs, 0)[length:trained]
        async with self._slots:
            started = self._clock()
            tokens = [*prompt.token_ids, *rollout.token_ids[prompt.replaces : length].tolist()][: self._longest]
            answer = await self._teacher.logprobs(tokens)
            self._seconds += self._clock() - started
        self._tokens += len(tokens)
        self._unscored += int(rollout.mask[length:trained].sum())
        tail = slice(prompt.replaces, length)
        logprobs[tail] = np.where(rollout.mask[tail], answer[len(prompt.token_ids) :], 0)
        return replace(rollout, ref_logprobs=logprobs)


def scoring_of(
    recipe: Recipe,
    arguments: OrchestratorArguments,
    waiting: Iterable[RolloutGroup],
    on_scored: Callable[[RolloutGroup], None],
    on_damaged: Callable[[RolloutGroup, DamagedError], None],
) -> Scoring | None:
    """Create the scoring of a recipe, and add the groups that wait already. Return None without a teacher.

    Raise TeacherError if the variable of its key is not set.
    """
    if recipe.teacher is None:
        return None
    # Each request needs room for one token more. Engines of the run accept no longer sequences for a hint.
    longest = recipe.max_len - 1 if isinstance(recipe.teacher, PolicyTeacher) else recipe.seq_len
    teacher = teacher_of(recipe, arguments)
    options = (recipe.teacher.concurrency, recipe.seq_len, on_scored)
    scoring = Scoring(teacher, *options, longest=longest, on_damaged=on_damaged)
    for group in waiting:
        scoring.add(group)
    return scoring
