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
from tests.chaos.kinds import KINDS
from tests.chaos.kinds.injury import Injury, NobodyThereError
from tests.chaos.ports import ports_left
from tests.chaos.scene import Scene
from tests.chaos.schedule import Fault, Round
from tests.chaos.spool_watch import SeenGroup, SpoolWatch
from tests.support.waiting import StallTimer

PATIENCE_S = 300.0
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


Say = Callable[[str], None]


def say_nothing(text: str) -> None:
    pass


class Chaos:
    """One run in a scene. `say` gets progress messages."""

    def __init__(self, scene: Scene, seed: int, steps: int, say: Say = say_nothing) -> None:
        self.scene, self.say = scene, say
        self.result = Result(seed, steps)
        self._records_lost = False
        self._excused: set[str] = set()
        self._damaged: dict[int, int] = {}
        """Steps whose checkpoints were damaged, by the attempt after which that happened."""

    def suffer(self, rounds: list[Round]) -> Result:
        """Start the run, inject rounds while it lasts, and check the invariants. Injected rounds are removed from
        `rounds`.
        """
        scene, result = self.scene, self.result
        scene.start(result.steps)
        watch = SpoolWatch(scene.run)
        watch.start()
        try:
            self._begin()
            while rounds and self._has_room():
                self._one(rounds.pop(0))
            self._finish()
        except AssertionError as error:
            result.problems.append(str(error))
        finally:
            scene.repair_cluster()
            if not scene.over(scene.look()):
                scene.end()
            seen = watch.close()
        self._check(seen)
        return result

    def _begin(self) -> None:
        self._until(lambda status: self._well(status) and (status.step or 0) >= 2, "does not start")

    def _has_room(self) -> bool:
        status = self.scene.look()
        return status is not None and not self.scene.over(status) and (status.step or 0) <= self.result.steps - ROOM

    def _finish(self) -> None:
        """Let the run complete."""
        status = self._until(self.scene.over, "does not end")
        assert status.phase == "completed", f"the run {status.phase}: {status.reason}"
        assert self.scene.wait_for_no_processes(), "processes of the job are left over"

    # a round

    def _one(self, round_: Round) -> None:
        scene = self.scene
        before, began = scene.look(), time.monotonic()
        assert before is not None
        pending = [(began + fault.after_s, fault) for fault in round_]
        injuries: list[tuple[str, Injury]] = []
        steps = [began]
        known = (before.attempt, before.step or 0)
        reference: tuple[int, int] | None = None
        try:
            with _repaired_in_time(injuries):
                while True:
                    pending = self._inject(pending, injuries)
                    status = scene.look()
                    if status is not None:
                        now = (status.attempt, status.step or 0)
                        if now[1] > known[1] or (now[0] > known[0] and now[1]):
                            steps.append(time.monotonic())
                            known = now
                        over = scene.over(status)
                        if over and status.phase != "completed":
                            raise AssertionError(f"the run {status.phase}: {status.reason}")
                        if over or (reference is not None and self._well(status) and now > reference):
                            break
                        settled = not pending and all(self._settled(injury, status) for _, injury in injuries)
                        if reference is None and settled:
                            reference = now if status.step is not None else (status.attempt, 0)
                    waited, late = time.monotonic() - began, f"is not well {PATIENCE_S:.0f} s after"
                    assert waited < PATIENCE_S, self._complaint(late, injuries, status)
                    time.sleep(PERIOD_S)
        except AssertionError:
            self.say(f"FAILED {[kind for kind, _ in injuries]} {[injury.target for _, injury in injuries]}")
            raise
        finally:
            for _, injury in injuries:
                injury.repair_if_due(now=True)
        seconds = time.monotonic() - began
        self._note(injuries, round(seconds, 1), [*steps, time.monotonic()], status.attempt - before.attempt)

    def _inject(
        self, pending: list[tuple[float, Fault]], injuries: list[tuple[str, Injury]]
    ) -> list[tuple[float, Fault]]:
        """Inject the faults that are due, and return the others."""
        due = [fault for at, fault in pending if time.monotonic() >= at]
        for fault in due:
            kind = KINDS[fault.kind]
            try:
                injury = kind.inject(self.scene, fault.dice())
            except NobodyThereError:
                self.result.missed += 1
                self.say(f"{kind.name}: nobody is there to be hit")
                continue
            self._records_lost |= kind.loses_records
            self._excused |= injury.leaves
            injuries.append((kind.name, injury))
            self.say(f"{kind.name}: {injury.target}")
        return [(at, fault) for at, fault in pending if fault not in due]

    def _settled(self, injury: Injury, status: RunStatus) -> bool:
        """Return whether the damage is done, and its cause is repaired or needs no repair."""
        if not injury.noticed(status):
            return False
        return injury.repaired or not injury.waits_for_repair

    def _well(self, status: RunStatus) -> bool:
        """Return whether all processes that the head has not given up are healthy."""
        states = [process.state for process in status.processes]
        return status.phase == "running" and "HEALTHY" in states and set(states) <= {"HEALTHY", "LOST"}

    def _note(self, injuries: list[tuple[str, Injury]], seconds: float, steps: list[float], new_attempts: int) -> None:
        """Record the round, and check which nodes the run blames."""
        outcome = Outcome(
            kinds=tuple(kind for kind, _ in injuries),
            targets=tuple(injury.target for _, injury in injuries),
            seconds=seconds,
            goal_s=max((injury.goal_s for _, injury in injuries), default=0.0),
            longest_step_s=round(max(b - a for a, b in pairwise(steps)), 1),
            new_attempts=new_attempts,
            load=round(os.getloadavg()[0], 1),
        )
        for _, injury in injuries:
            self._damaged |= injury.damaged
        if injuries:
            self.result.outcomes.append(outcome)
        self.say(f"  well after {seconds} s, at most {outcome.longest_step_s} s without a step, load {outcome.load}")
        at_fault = {node for _, injury in injuries for node in injury.nodes}
        for entry in self.scene.blamed():
            if entry.node not in at_fault:
                self.result.problems.append(f"{entry.node} is blamed after {outcome.kinds}: {entry.reason}")
        self.scene.repair_cluster()

    # invariants

    def _until(self, condition: Callable[[RunStatus], bool], complaint: str) -> RunStatus:
        timer = StallTimer()
        while True:
            status = self.scene.look()
            if status is not None and condition(status):
                return status
            stalled = timer.stalled(status and (status.attempt, status.step))
            assert not stalled and not self.scene.over(status), self._complaint(complaint, [], status)
            time.sleep(PERIOD_S)

    def _complaint(self, what: str, injuries: list[tuple[str, Injury]], status: RunStatus | None) -> str:
        done = ", ".join(f"{kind} ({injury.target})" for kind, injury in injuries)
        if status is None:
            return f"the run {what} {done}: its status cannot be read"
        ill = {process.name: process.state for process in status.processes if process.state != "HEALTHY"}
        where = f"{status.phase} {status.reason}, attempt {status.attempt}, step {status.step}"
        return f"the run {what} {done}: {where}, {ill}"

    def _check(self, seen: list[SeenGroup]) -> None:
        run, result, steps, lossy = self.scene.run, self.result, self.result.steps, self._records_lost
        found = invariants.segments(run)
        lost = invariants.committed_steps_lost(found, self._damaged)
        result.attempts = len(run.attempts())
        result.committed_steps_lost = len(lost)
        result.problems += lost
        if any(problem.startswith("the run") for problem in result.problems):
            return  # a run that has not completed violates the other invariants anyway
        given = invariants.batches(run)
        result.fates = invariants.fates(seen, given, found, MAX_OFF_POLICY_STEPS, self._damaged)
        result.problems += [
            *invariants.trained_once(found, steps, records_lost=lossy),
            *invariants.checkpoints_whole(run, found, steps),
            *invariants.groups_once(given, steps),
            *invariants.metrics_once(run, steps, records_lost=lossy),
            *result.fates.problems,
            *invariants.left_over(run, self.scene.tmp, self._excused),
            *ports_left(run),
        ]


def to_stderr(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _repaired_in_time(injuries: list[tuple[str, Injury]]) -> Iterator[None]:
    """Repair in a thread while the status is read, which without a controller takes half a minute."""
    over = threading.Event()

    def repair() -> None:
        while not over.wait(PERIOD_S):
            for _, injury in list(injuries):
                injury.repair_if_due()

    thread = threading.Thread(target=repair, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
