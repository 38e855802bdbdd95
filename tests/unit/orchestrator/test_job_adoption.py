"""A restarted orchestrator adopts the jobs of its workers: no rollout is lost, repeated or too old."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits, Examples
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.recipe.sections.staleness import Staleness
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.unit.orchestrator.test_dispatch import limits, make_dispatcher, rollout, run_all
from tests.unit.orchestrator.test_dispatch_sizes import age
from tests.unit.orchestrator.test_end_to_end import FakeRun, finish

LAST = 12
RULES = [
    Staleness(),
    Staleness(rule="mask"),
    Staleness(rule="partial", min_rollouts=2),
    Staleness(rule="carry", min_rollouts=2),
    Staleness(extra_rollouts=1),
    Staleness(extra_rollouts=1, surplus="carry"),
]


def restarted(limit: DispatchLimits, step: int = 1, **state: object) -> Dispatcher:
    examples = Examples(limit.ratios, **state)  # type: ignore[arg-type]
    dispatcher = Dispatcher(limit, ["http://r0", "http://r1"], "run.1", "later", step, examples=examples)
    dispatcher.version = 0
    return dispatcher


def test_restarted_orchestrator_continues_a_group() -> None:
    dispatcher = make_dispatcher(limits())
    first, second, *_ = run_all(dispatcher)
    assert first.group == second.group
    assert dispatcher.finished(first.id, rollout(first)) is None and dispatcher.holds_result(first.id)
    again = restarted(limits(), cursors={}, unfinished=dispatcher.unfinished)
    assert again.adopt_job(second, runs=True) and again.adopt_job(first, runs=False)
    assert first.id not in {job.id for job in run_all(again)}
    assert again.finished(first.id, rollout(first)) is None
    group = again.finished(second.id, rollout(second))
    assert group is not None and group.id == first.group and group.opened_version == 0
    assert again.holds_result(first.id), "the group is not on disk yet"
    assert again.add_ready(group) and not again.holds_result(first.id)
    opened = [job.group for job in run_all(again)]
    assert first.group not in opened, "the example is not opened again"


@pytest.mark.parametrize(
    "why", ["own", "evaluation", "attempt", "environment", "replica", "old", "complete", "full", "anew"]
)
def test_unneeded_job_is_not_adopted(why: str) -> None:
    dispatcher = make_dispatcher(limits())
    job, other, *_ = run_all(dispatcher)
    taken = {job.group} if why == "complete" else ()
    again = restarted(limits(), step=5 if why == "old" else 1, taken=taken)
    changes = {
        "own": {"sender": "later"},
        "evaluation": {"sender": ""},
        "attempt": {"cache_salt": "run.2:0"},
        "environment": {"environment": "gone"},
        "replica": {"router": "http://gone"},
    }
    if why == "full":
        assert again.adopt_job(job, runs=True) and again.adopt_job(other, runs=True)
        job = Job("more", *[getattr(job, name) for name in job.__struct_fields__[1:]])
    if why == "anew":
        again.version = 1
        assert job.group in {new.group for new in run_all(again)}
    changed = Job(**{name: getattr(job, name) for name in job.__struct_fields__} | changes.get(why, {}))
    before = again.inflight
    assert not again.adopt_job(changed, runs=True) and again.inflight == before


def test_carried_rollout_is_adopted_after_its_group_is_trained() -> None:
    rule = Staleness(rule="carry", min_rollouts=2)
    dispatcher = restarted(limits(group_sizes={"a": 4, "b": 4}, max_inflight=8, ratios={"a": 1.0}, staleness=rule))
    jobs = [job for job in run_all(dispatcher) if job.group == "a-00000000"]
    for job in jobs[:2]:
        dispatcher.finished(job.id, rollout(job))
    positions, group = (
        {"cursors": dispatcher.cursors, "unfinished": dispatcher.unfinished},
        dispatcher.open["a-00000000"].complete(),
    )
    incarnations = iter(["a", "b"])

    def again(taken: set[str]) -> Dispatcher:
        examples = Examples(dispatcher.limits.ratios, taken=taken, **positions)
        return Dispatcher(
            dispatcher.limits, ["http://r0", "http://r1"], "run.1", next(incarnations), 2, examples=examples
        )

    trained = again({"a-00000000"})
    trained._examples.mark_opened(("a", 0))
    assert not trained.adopt_job(jobs[1], runs=False), "an ended rollout may be in the trained group"
    assert trained.adopt_job(jobs[2], runs=True) and trained.adopt_job(jobs[3], runs=True)
    assert not trained.adopt_job(jobs[3], runs=True)
    (part,) = [one for one in trained.open.values() if one.jobs]
    assert (part.id, part.jobs) == ("a-00000000.2001", {jobs[2].id: 0, jobs[3].id: 1})
    assert not part.to_dispatch, "`min_rollouts` rollouts complete it"
    more, *others = (msgspec.structs.replace(jobs[2], id=f"{group.id}/{n}-c") for n in (4, 5, 6))
    assert trained.adopt_job(more, runs=True) and part.jobs[more.id] == 2 and trained.open.pending(0) == 3
    for job in [*jobs[2:], more]:
        last = trained.finished(job.id, rollout(job))
    assert last is not None and last.id == part.id and trained.add_ready(last)
    assert all(trained.adopt_job(job, runs=True) for job in others), "the next continuation has room"
    lost = again(set())  # the complete group was not on disk, so its example is sampled again
    carried = msgspec.structs.replace(more, group=part.id)
    assert lost.adopt_job(carried, runs=True) and not lost.adopt_job(
        msgspec.structs.replace(carried, id="ended"), runs=False
    )
    assert list(lost.open) == [group.id]
    dropped = limits(group_sizes={"a": 4}, ratios={"a": 1.0})
    examples = Examples(dropped.ratios, taken={group.id}, **positions)
    examples.mark_opened(("a", 0))
    plain = Dispatcher(dropped, ["http://r0", "http://r1"], "run.1", "c", 2, examples=examples)
    assert not plain.adopt_job(jobs[2], runs=True), "this rule carries no rollout"


class Campaign:
    """A dispatcher and its workers. The orchestrator is killed now and then."""

    def __init__(self, limit: DispatchLimits, source: random.Random) -> None:
        self.limits, self.source = limit, source
        self.dispatcher = restarted(limit)
        self.kills = self.claimed = 0
        self.running: dict[str, Job] = {}
        self.held: dict[str, Job] = {}
        self.used: list[RolloutGroup] = []
        self.uncommitted: list[list[str]] = []
        self.writing: list[RolloutGroup] = []
        """Complete groups that are not on disk yet."""
        self.given_up: set[str] = set()
        """Groups whose rollouts failed too often."""
        self.stale: set[str] = set()
        """Complete groups that became too old: their examples come again."""
        self.late: Counter[str] = Counter()
        """Rollouts that were claimed when others had begun in their place, by example: they are trained, too."""
        self.record()

    def record(self) -> None:
        """Record the positions, as with a batch."""
        dispatcher = self.dispatcher
        self.recorded = {
            "cursors": dispatcher.cursors,
            "unfinished": dispatcher.unfinished,
            "returned": dispatcher.returned,
        }

    def end(self, job: Job) -> None:
        group = self.dispatcher.finished(job.id, rollout(job, max(0, self.dispatcher.version)))
        self.held[job.id] = job
        for name in self.dispatcher.take_surplus_jobs():
            del self.running[name]
        self.running.pop(job.id, None)
        if group is not None:
            self.writing.append(group)

    def fail(self, job: str) -> None:
        before = set(self.dispatcher.open)
        for name in [job, *self.dispatcher.failed(job)]:
            del self.running[name]
        self.given_up |= before - self.dispatcher.open.keys()

    def write(self) -> None:
        while self.writing:
            self.add(self.writing.pop(0))

    def add(self, group: RolloutGroup) -> None:
        """Add a group that is on disk. A stale one is deleted once its example is recorded as unfinished."""
        if not self.dispatcher.add_ready(group):
            self.stale.add(group.id)
            self.record()

    def kill(self) -> None:
        self.kills += 1
        before = self.dispatcher
        held = [job for name, job in self.held.items() if before.holds_result(name) and self.source.random() < 0.9]
        self.writing = []
        version, ready = before.version, before.ready
        incarnation = f"i{self.kills}"
        taken = {name for names in self.uncommitted for name in names}
        examples = Examples(self.limits.ratios, taken=taken, **self.recorded)
        self.dispatcher = Dispatcher(self.limits, ["r0"], "run", incarnation, before.step, examples=examples)
        for group in sorted(ready, key=lambda group: group.id):
            self.add(group)
        jobs = [*self.running.values(), *held]
        self.source.shuffle(jobs)
        late = [job for job in jobs if self.source.random() < 0.1]  # their worker reported too late
        finished = {job.id for job in held}
        self.running = {}
        for job in jobs:
            if job not in late:
                self.claim(job, finished)
        self.dispatcher.version = version
        for job in late:
            self.begin()
            self.late[job.group.partition(".")[0]] += self.claim(job, finished)

    def claim(self, job: Job, finished: set[str]) -> bool:
        """Adopt a job, and return whether that succeeded."""
        runs = job.id not in finished
        if not self.dispatcher.adopt_job(job, runs=runs):
            return False
        assert not self.dispatcher.adopt_job(job, runs=runs), "it was adopted before"
        self.claimed += 1
        self.running[job.id] = job
        if job.id in finished:
            self.end(job)
        return True

    def begin(self) -> None:
        while job := self.dispatcher.next_job(self.limits.ratios):
            self.running[job.id] = job

    def form_batch(self) -> None:
        step = self.dispatcher.step
        result = self.dispatcher.apply_age_limit(step)
        self.stale |= {group.id for group in result.stale}
        for name in result.cancelled:
            self.running.pop(name, None)
        for group in result.early:
            self.writing.append(group)
        returned = self.dispatcher.returned
        batch = self.dispatcher.take_batch() or []
        if batch:
            self.uncommitted = [*self.uncommitted[-1:], [group.id for group in batch]]
        for group in batch:
            oldest = step - 1 - self.limits.max_off_policy_steps
            assert age(group, self.limits.staleness, returned) >= oldest
            self.used.append(group)
        self.record()
        self.dispatcher.version = self.dispatcher.step - 1


@given(
    rule=st.sampled_from(RULES),
    sizes=st.sampled_from([(4,), (2, 4)]),
    off_policy=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)
def test_any_order_of_ends_failures_and_kills(
    rule: Staleness, sizes: Sequence[int], off_policy: int, seed: int
) -> None:
    source, labels = random.Random(seed), [f"e{index}" for index in range(len(sizes))]
    batch = 2 * sizes[-1]
    ratios = {label: source.choice([0.5, 1.0, 3.0]) for label in labels}
    limit = DispatchLimits(
        dict(zip(labels, sizes, strict=True)), batch, source.randint(4, 3 * batch), off_policy, LAST, ratios, 1.0, rule
    )
    run = Campaign(limit, source)
    run.dispatcher = Dispatcher(limit, ["r0"], "run", "i0")
    run.dispatcher.version = 0
    for _ in range(6000):
        if run.dispatcher.step > LAST:
            break
        run.begin()
        event = source.random()
        if run.running and event < 0.75:
            run.end(source.choice(list(run.running.values())))
        elif run.running and event < 0.8:
            run.fail(min(run.running))  # of an early group, so that some groups are given up
        elif run.running and event < 0.85:
            run.dispatcher.lost(job := source.choice(list(run.running)))
            del run.running[job]
        elif event < 0.86:
            run.kill()
        elif event < 0.93:
            run.write()
        else:
            run.form_batch()
        assert set(run.running) == set(run.dispatcher._jobs)
        ends = sum(run.dispatcher.counts[how] for how in ("finished", "failed", "cancelled", "lost"))
        assert run.dispatcher.counts["dispatched"] == ends + run.dispatcher.inflight
    assert run.dispatcher.step == LAST + 1, "the run ends"
    rollouts = [sequence.info.id for group in run.used for sequence in group.sequences]
    assert len(rollouts) == len(set(rollouts)), "no rollout is trained twice"
    names = [group.id for group in run.used]
    assert len(names) == len(set(names)), "no group is trained twice"
    if rule.rule == "carry":
        for name in {name.partition(".")[0] for name in names} - run.stale:
            mine = [group.size for group in run.used if group.id.partition(".")[0] == name]
            most = limit.group_sizes[name.partition("-")[0]] + (len(mine) - 1) * (rule.min_rollouts - 1)
            assert sum(mine) <= most + run.late[name], "no example is trained more than others"
    waiting = {group.id for group in (*run.dispatcher.ready, *run.writing)}
    for label, cursor in run.dispatcher.cursors.items():
        every = {f"{label}-{example:08d}" for example in range(cursor)}
        unfinished = {f"{name}-{example:08d}" for name, example in run.dispatcher.unfinished}
        covered = {name.partition(".")[0] for name in (*names, *run.given_up)} | waiting | unfinished
        assert every <= covered, "no example is lost"


def test_killed_orchestrator_adopts_running_rollouts(tmp_path: Path) -> None:
    """With real processes, rollouts in flight continue in their worker."""
    engine = FakeEngine(write_tokenizer(tmp_path / "model"), delay_s=0.05)
    with engine, FakeRun(engine, tmp_path) as run:
        state = run.run_dir / "attempts/1/state/orchestrator.json"

        def counted(name: str) -> int:
            return int(run.state()["counts"].get(name, 0)) if state.exists() else 0

        engine.held = True
        link = run.begin()
        run.wait_until(lambda: counted("dispatched") and engine.requests)
        run.kill("orchestrator")
        run.start("orchestrator")
        run.wait_until(lambda: counted("claimed"))
        engine.held = False
        finish(run, link, 1)
