"""Injects the rounds of a schedule into a run, and waits for recovery after each."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from primeslurm.run.status.run_status import RunStatus
from tests.chaos import invariants
from tests.chaos.faulty_deployment import FaultyDeployment
from tests.chaos.kinds import KINDS
from tests.chaos.kinds.fault_effect import FaultEffect, NoTargetError
from tests.chaos.ports import ports_left
from tests.chaos.schedule import Fault, Round
from tests.chaos.spool_watch import SeenGroup, SpoolWatch
from tests.support.waiting import StallTimer

TIMEOUT_S = 300.0
"""Time after which a run without recovery has failed [s]."""
PERIOD_S = 0.4
ROOM = 4
"""Steps that must remain for a fault to have an effect."""
MAX_OFF_POLICY_STEPS = 8
"""Of tests/emulated/small.yaml."""


@dataclass(frozen=True)
class Outcome:
    """Result of a round."""

    kinds: tuple[str, ...]
    targets: tuple[str, ...]
    seconds: float
    """Seconds from the first fault until all processes are healthy and one more step is trained."""
    goal_s: float
    longest_step_s: float
    """Longest time without a step meanwhile [s]."""
    new_attempts: int
    load: float
    """Load average of the machine over the last minute."""


@dataclass
class Result:
    """A run and its rounds."""

    seed: int
    steps: int
    outcomes: list[Outcome] = field(default_factory=list)
    attempts: int = 0
    missed: int = 0
    """Number of faults without a target."""
    committed_steps_lost: int = 0
    fates: invariants.Fates = field(default_factory=invariants.Fates)
    problems: list[str] = field(default_factory=list)


Log = Callable[[str], None]


def log_nothing(text: str) -> None:
    pass


class Chaos:
    """One run in a deployment. `log` gets progress messages."""

    def __init__(self, deployment: FaultyDeployment, seed: int, steps: int, log: Log = log_nothing) -> None:
        self.deployment, self.log = deployment, log
        self.result = Result(seed, steps)
        self._records_lost = False
        self._excused: set[str] = set()
        self._damaged: dict[int, int] = {}
        """Steps whose checkpoints were damaged, by the attempt after which that happened."""

    def run(self, rounds: list[Round]) -> Result:
        """Start the run, inject rounds while it lasts, and check the invariants. Injected rounds are removed from
        `rounds`.
        """
        deployment, result = self.deployment, self.result
        deployment.start(result.steps)
        watch = SpoolWatch(deployment.run)
        watch.start()
        try:
            self._begin()
            while rounds and self._has_room():
                self._one(rounds.pop(0))
            self._finish()
        except AssertionError as error:
            result.problems.append(str(error))
        finally:
            deployment.repair_cluster()
            if not deployment.over(deployment.look()):
                deployment.end()
            seen = watch.close()
        self._check(seen)
        return result

    def _begin(self) -> None:
        self._until(lambda status: self._healthy(status) and (status.step or 0) >= 2, "does not start")

    def _has_room(self) -> bool:
        status = self.deployment.look()
        return (
            status is not None and not self.deployment.over(status) and (status.step or 0) <= self.result.steps - ROOM
        )

    def _finish(self) -> None:
        """Let the run complete."""
        status = self._until(self.deployment.over, "does not end")
        assert status.phase == "completed", f"the run {status.phase}: {status.reason}"
        assert self.deployment.wait_for_no_processes(), "the job has left processes"

    # a round

    def _one(self, round_: Round) -> None:
        deployment = self.deployment
        before, began = deployment.look(), time.monotonic()
        assert before is not None
        pending = [(began + fault.after_s, fault) for fault in round_]
        effects: list[tuple[str, FaultEffect]] = []
        steps = [began]
        newest = (before.attempt, before.step or 0)
        reference: tuple[int, int] | None = None
        try:
            with _repaired_in_time(effects):
                while True:
                    pending = self._inject(pending, effects)
                    status = deployment.look()
                    if status is not None:
                        now = (status.attempt, status.step or 0)
                        if now[1] > newest[1] or (now[0] > newest[0] and now[1]):
                            steps.append(time.monotonic())
                            newest = now
                        over = deployment.over(status)
                        if over and status.phase != "completed":
                            raise AssertionError(f"the run {status.phase}: {status.reason}")
                        if over or (reference is not None and self._healthy(status) and now > reference):
                            break
                        settled = not pending and all(self._settled(effect, status) for _, effect in effects)
                        if reference is None and settled:
                            reference = now if status.step is not None else (status.attempt, 0)
                    waited, late = time.monotonic() - began, f"has not recovered {TIMEOUT_S:.0f} s after"
                    assert waited < TIMEOUT_S, self._complaint(late, effects, status)
                    time.sleep(PERIOD_S)
        except AssertionError:
            self.log(f"FAILED {[kind for kind, _ in effects]} {[effect.target for _, effect in effects]}")
            raise
        finally:
            for _, effect in effects:
                effect.repair_if_due(now=True)
        seconds = time.monotonic() - began
        self._note(effects, round(seconds, 1), [*steps, time.monotonic()], status.attempt - before.attempt)

    def _inject(
        self, pending: list[tuple[float, Fault]], effects: list[tuple[str, FaultEffect]]
    ) -> list[tuple[float, Fault]]:
        """Inject the faults that are due, and return the others."""
        due = [fault for at, fault in pending if time.monotonic() >= at]
        for fault in due:
            kind = KINDS[fault.kind]
            try:
                effect = kind.inject(self.deployment, fault.rng())
            except NoTargetError:
                self.result.missed += 1
                self.log(f"{kind.name}: no target at present")
                continue
            self._records_lost |= kind.loses_records
            self._excused |= effect.leaves
            effects.append((kind.name, effect))
            self.log(f"{kind.name}: {effect.target}")
        return [(at, fault) for at, fault in pending if fault not in due]

    def _settled(self, effect: FaultEffect, status: RunStatus) -> bool:
        """Return whether the damage is done, and its cause is repaired or needs no repair."""
        if not effect.noticed(status):
            return False
        return effect.repaired or not effect.waits_for_repair

    def _healthy(self, status: RunStatus) -> bool:
        """Return whether all processes that the head has not given up are healthy."""
        states = [process.state for process in status.processes]
        return status.phase == "running" and "HEALTHY" in states and set(states) <= {"HEALTHY", "LOST"}

    def _note(
        self, effects: list[tuple[str, FaultEffect]], seconds: float, steps: list[float], new_attempts: int
    ) -> None:
        """Record the round, and check which nodes the run blames."""
        outcome = Outcome(
            kinds=tuple(kind for kind, _ in effects),
            targets=tuple(effect.target for _, effect in effects),
            seconds=seconds,
            goal_s=max((effect.goal_s for _, effect in effects), default=0.0),
            longest_step_s=round(max(b - a for a, b in pairwise(steps)), 1),
            new_attempts=new_attempts,
            load=round(os.getloadavg()[0], 1),
        )
        for _, effect in effects:
            self._damaged |= effect.damaged
        if effects:
            self.result.outcomes.append(outcome)
        self.log(
            f"  recovered after {seconds} s, at most {outcome.longest_step_s} s without a step, load {outcome.load}"
        )
        at_fault = {node for _, effect in effects for node in effect.nodes}
        for entry in self.deployment.blamed():
            if entry.node not in at_fault:
                self.result.problems.append(f"{entry.node} is blamed after {outcome.kinds}: {entry.reason}")
        self.deployment.repair_cluster()

    # invariants

    def _until(self, condition: Callable[[RunStatus], bool], complaint: str) -> RunStatus:
        timer = StallTimer()
        while True:
            status = self.deployment.look()
            if status is not None and condition(status):
                return status
            stalled = timer.stalled(status and (status.attempt, status.step))
            assert not stalled and not self.deployment.over(status), self._complaint(complaint, [], status)
            time.sleep(PERIOD_S)

    def _complaint(self, what: str, effects: list[tuple[str, FaultEffect]], status: RunStatus | None) -> str:
        done = ", ".join(f"{kind} ({effect.target})" for kind, effect in effects)
        if status is None:
            return f"the run {what} {done}: its status cannot be read"
        unhealthy = {process.name: process.state for process in status.processes if process.state != "HEALTHY"}
        where = f"{status.phase} {status.reason}, attempt {status.attempt}, step {status.step}"
        return f"the run {what} {done}: {where}, {unhealthy}"

    def _check(self, seen: list[SeenGroup]) -> None:
        run, result, steps, lossy = self.deployment.run, self.result, self.result.steps, self._records_lost
        segments = invariants.segments(run)
        lost = invariants.committed_steps_lost(segments, self._damaged)
        result.attempts = len(run.attempts())
        result.committed_steps_lost = len(lost)
        result.problems += lost
        if any(problem.startswith("the run") for problem in result.problems):
            return  # a run that has not completed violates the other invariants anyway
        given = invariants.batches(run)
        result.fates = invariants.fates(seen, given, segments, MAX_OFF_POLICY_STEPS, self._damaged)
        result.problems += [
            *invariants.trained_once(segments, steps, records_lost=lossy),
            *invariants.checkpoints_whole(run, segments, steps),
            *invariants.groups_once(given, steps),
            *invariants.metrics_once(run, steps, records_lost=lossy),
            *result.fates.problems,
            *invariants.leftovers(run, self.deployment.tmp, self._excused),
            *ports_left(run),
        ]


def to_stderr(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _repaired_in_time(effects: list[tuple[str, FaultEffect]]) -> Iterator[None]:
    """Repair in a thread while the status is read, which without a controller takes half a minute."""
    over = threading.Event()

    def repair() -> None:
        while not over.wait(PERIOD_S):
            for _, effect in list(effects):
                effect.repair_if_due()

    thread = threading.Thread(target=repair, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
