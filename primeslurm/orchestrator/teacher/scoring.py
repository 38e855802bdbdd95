"""Complete groups on their way through the teacher: its log-probabilities of all tokens that they train."""

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
    """Asks in the order in which groups were completed, about so many sequences at once.

    Groups that are on disk alone are read when it is their turn.

    Args:
        teacher: is asked.
        concurrency: sequences.
        seq_len: tokens beyond it are not trained, so not asked about either.
        on_scored: called with each group once it has its log-probabilities, unless it was dropped.
        clock: says the time in seconds.
        longest: tokens that a request may have. Default: seq_len.
        on_damaged: called with a group on disk that cannot be read, and why.
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
        self._gate = asyncio.Semaphore(concurrency)
        self._unanswered = 0
        """Sequences of groups that are asked about."""
        self._answered = asyncio.Event()
        self._seq_len = seq_len
        self._longest = longest or seq_len
        self._on_scored = on_scored
        self._on_damaged = on_damaged
        self._clock = clock
        self._added: asyncio.Queue[RolloutGroup] = asyncio.Queue()
        self._wanted: dict[str, asyncio.Task[None] | None] = {}
        """By group: who asks about it, once somebody does."""
        self._seconds = 0.0
        self._tokens = 0
        self._unasked = 0

    def add(self, group: RolloutGroup) -> None:
        """Ask about a group."""
        self._wanted[group.id] = None
        self._added.put_nowait(group)

    def drop(self, groups: Iterable[RolloutGroup]) -> None:
        """Ask no longer about groups; unknown ones are ignored."""
        for group in groups:
            if (task := self._wanted.pop(group.id, None)) is not None:
                task.cancel()

    async def run(self, journal: Journal) -> None:
        """Ask until cancelled. What the teacher refuses gets an event in `journal`.

        Raises:
            ExceptionGroup: of a TeacherError.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    group = await self._read(await self._added.get())
                    if group is not None and group.id in self._wanted:
                        self._wanted[group.id] = task = tasks.create_task(self._score(group, journal))
                        self._asks(len(group.sequences))
                        task.add_done_callback(functools.partial(self._asks, -len(group.sequences)))
        finally:
            await self._teacher.close()

    def take_metrics(self) -> Row:
        """Return what it cost since the last call: seconds over all requests, and tokens that were asked about.

        teacher/unasked_tokens: sampled tokens that requests had no room for; the teacher is taken to agree with the
        policy about them.
        """
        row = {"teacher/seconds": self._seconds, "teacher/tokens": float(self._tokens)}
        row["teacher/unasked_tokens"] = float(self._unasked)
        self._seconds, self._tokens, self._unasked = 0.0, 0, 0
        return row | {"teacher/waiting": float(len(self._wanted))}

    def _asks(self, sequences: int, _ended: object = None) -> None:
        self._unanswered += sequences
        self._answered.set()

    async def _read(self, group: RolloutGroup) -> RolloutGroup | None:
        """A group with its arrays in memory; one on disk is read so early that the teacher need not wait for it."""
        if not isinstance(group, SpooledGroup):
            return group
        while self._unanswered >= 2 * self._concurrency:
            self._answered.clear()
            await self._answered.wait()
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
                asked = [[tasks.create_task(self._sequence(one)) for one in branches] for branches in group.rollouts]
        except* TeacherError as refused:
            journal.write(Stalled("teacher", str(refused.exceptions[0])))
            raise
        self._wanted.pop(group.id, None)
        rollouts = tuple(tuple(task.result() for task in rollout) for rollout in asked)
        self._on_scored(replace(group, rollouts=rollouts))

    async def _sequence(self, rollout: Rollout) -> Rollout:
        prompt = rollout.info.teacher_prompt or TeacherPrompt([], 0)
        longer = len(prompt.token_ids) - prompt.replaces
        trained = min(len(rollout.token_ids), self._seq_len)
        length = max(prompt.replaces, min(trained, self._longest - longer))
        found = np.zeros(len(rollout.token_ids), np.float32)
        found[length:trained] = np.where(rollout.mask, rollout.logprobs, 0)[length:trained]
        async with self._gate:
            started = self._clock()
            asked = [*prompt.token_ids, *rollout.token_ids[prompt.replaces : length].tolist()][: self._longest]
            answer = await self._teacher.logprobs(asked)
            self._seconds += self._clock() - started
        self._tokens += len(asked)
        self._unasked += int(rollout.mask[length:trained].sum())
        tail = slice(prompt.replaces, length)
        found[tail] = np.where(rollout.mask[tail], answer[len(prompt.token_ids) :], 0)
        return replace(rollout, ref_logprobs=found)


def scoring_of(
    recipe: Recipe,
    arguments: OrchestratorArguments,
    waiting: Iterable[RolloutGroup],
    on_scored: Callable[[RolloutGroup], None],
    on_damaged: Callable[[RolloutGroup, DamagedError], None],
) -> Scoring | None:
    """Make the scoring of the groups that wait already, and of others.

    Returns:
        None if the recipe has no teacher.

    Raises:
        TeacherError: the variable of its key is not set.
    """
    if recipe.teacher is None:
        return None
    # each request asks for one token more, and the engines of the run accept no longer sequence for a hint
    longest = recipe.max_len - 1 if isinstance(recipe.teacher, PolicyTeacher) else recipe.seq_len
    teacher = teacher_of(recipe, arguments)
    options = (recipe.teacher.concurrency, recipe.seq_len, on_scored)
    scoring = Scoring(teacher, *options, longest=longest, on_damaged=on_damaged)
    for group in waiting:
        scoring.add(group)
    return scoring
