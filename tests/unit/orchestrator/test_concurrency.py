"""Adaptive concurrency: limits of replicas by the metrics of their engines, also when engines are slow or lost."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from benchmarks.concurrency import COLD_S, LOOK_S, WINDOW_S, WORKLOADS, Workload, World
from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits
from primeslurm.orchestrator.dispatch.concurrency import (
    CACHE_SHARE,
    FAR_GROWTH,
    FIRST_S,
    FLOOR_PER_ENGINE,
    GROWTH,
    GROWTH_S,
    NO_METRICS_S,
    START_PER_ENGINE,
    Concurrency,
    Look,
    RolloutModel,
)
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.telemetry.engine_load import COUNTERS, GAUGES, Sample
from primeslurm.records.state import ReplicaLoad

ROUTERS = ["router-0", "router-1"]


class Engines:
    """Engines with given metrics, observed every five seconds."""

    def __init__(self, *names: str, bound: int = 10_000) -> None:
        self.now = 0.0
        routers = sorted({f"router-{name.split('-')[1][1:]}" for name in names})
        self.controller = Concurrency(routers, names, bound, clock=lambda: self.now)
        self.samples: dict[str, Sample] = {name: dict.fromkeys((*GAUGES, *COUNTERS), 0.0) for name in names}
        self.inflight: dict[str, int] = {}
        self.evaluating: dict[str, int] = {}
        self.ended: Counter[str] = Counter()
        self.observe()

    @property
    def slots(self) -> dict[str, int]:
        return self.controller.slots

    @property
    def report(self) -> dict[str, ReplicaLoad]:
        return self.controller.report

    def observe(self) -> None:
        samples = {name: dict(sample) for name, sample in self.samples.items()}
        self.controller.observe(samples, self.inflight, self.ended, self.evaluating)

    def run(self, seconds: float, kv_each: float = 0.001, ended: int = 100, **metrics: float) -> None:
        """Use every slot, with rollouts that hold `kv_each` of a cache. Between two looks `ended` of them end.

        Other metrics are values of gauges, and growth of counters between two looks.
        """
        for _ in range(round(seconds / 5)):
            self.now += 5
            self.inflight = dict(self.slots)
            for name, sample in self.samples.items():
                router = f"router-{name.split('-')[1][1:]}"
                of_replica = [other for other in self.samples if other.split("-")[1] == name.split("-")[1]]
                sampling = [other for other in of_replica if not other.startswith("prefill")]
                sample["running"] = self.inflight.get(router, 0) / max(1, len(sampling))
                sample["kv_usage"] = min(1.0, sample["running"] * kv_each)
                sample["generated"] += metrics.get("generated", 1000)
                at_prefill = name.startswith("prefill")
                sample["waiting"] = metrics.get("prefill_waiting" if at_prefill else "waiting", 0)
                sample["waiting_deferred"] = 0 if at_prefill else metrics.get("deferred", 0)
                self.ended[router] += ended
            self.observe()

    def sample_only(self, seconds: float, speed: float) -> None:
        """Use every slot. Rollouts of replica 1 generate `speed` times as much as others. Nothing else changes."""
        for _ in range(round(seconds / 5)):
            self.now += 5
            self.inflight = dict(self.slots)
            for name, sample in self.samples.items():
                replica = name.split("-")[1][1:]
                sample["generated"] += 10 * self.inflight[f"router-{replica}"] * (speed if replica == "1" else 1)
            self.observe()


NAMES = ["engine-r0-0", "engine-r0-1", "prefill-r1-0", "decode-r1-0"]
BEGIN = {"router-0": 2 * START_PER_ENGINE, "router-1": START_PER_ENGINE}


def test_unseen_replica_has_the_initial_limit() -> None:
    engines = Engines(*NAMES)
    late = {name: engines.samples.pop(name) for name in NAMES if "r1" in name}
    controller = Concurrency(ROUTERS, NAMES, 10_000)
    assert controller.slots == BEGIN and controller.report == {}, "dispatch starts before the first look"
    controller.observe(engines.samples, {}, {})
    assert controller.slots == BEGIN and set(controller.report) == {"0"}, "one engine is late"
    controller.observe(late, {}, {})
    assert controller.slots == BEGIN | {"router-0": 0}


def test_first_rollouts_are_spread_over_late_replicas() -> None:
    engines = Engines(*NAMES)
    dispatcher = make_dispatcher(Concurrency(ROUTERS, NAMES, 10_000).slots, max_inflight=512)

    def fill() -> dict[str, int]:
        while dispatcher.next_job({"e"}):
            pass
        return dispatcher.replicas.load

    assert fill() == BEGIN
    late = {name: engines.samples.pop(name) for name in NAMES if "r1" in name}
    times = iter(range(5, 1000, 5))
    concurrency = Concurrency(ROUTERS, NAMES, 10_000, clock=lambda: next(times))
    for _ in range(120):
        for sample in engines.samples.values():
            sample |= {"running": 16, "kv_usage": 0.01, "generated": sample["generated"] + 1000}
        samples = {name: dict(sample) for name, sample in engines.samples.items()}
        concurrency.observe(samples, dispatcher.replicas.load, {})
        dispatcher.replicas.limits = concurrency.slots
        fill()
    assert dispatcher.replicas.load["router-1"] == BEGIN["router-1"], "the replica has not answered yet"
    assert dispatcher.replicas.load["router-0"] > BEGIN["router-0"]
    concurrency.observe(engines.samples | late, dispatcher.replicas.load, {})
    assert concurrency.slots["router-1"] == BEGIN["router-1"]


def test_replicas_have_no_limit_without_metrics() -> None:
    times = iter(range(0, 10_000, 5))
    controller = Concurrency(ROUTERS, NAMES, 10_000, clock=lambda: next(times))
    for _ in range(120):
        controller.observe({}, {}, {})
    assert controller.slots == BEGIN, "no rollout runs yet"
    looks = 0
    while controller.slots:
        controller.observe({}, {"router-0": 1}, {})
        looks += 1
    assert looks == NO_METRICS_S / 5
    controller.observe({name: {} for name in NAMES}, {"router-0": 500}, {})
    assert controller.slots == BEGIN


def test_limit_grows_slowly_while_all_rollouts_are_young() -> None:
    engines = Engines("engine-r0-0")
    engines.run(FIRST_S, kv_each=0.01, ended=0)
    assert engines.slots["router-0"] == START_PER_ENGINE, "nobody knows how large a rollout becomes"
    engines.run(FIRST_S, kv_each=0.01, ended=0)
    assert 1.8 * START_PER_ENGINE <= engines.slots["router-0"] <= 2 * START_PER_ENGINE, "in proportion to time"
    engines.run(120, kv_each=0.01)
    assert engines.slots["router-0"] > 4 * START_PER_ENGINE, "rollouts have ended"


@pytest.mark.parametrize(("seconds", "queued", "least", "most"), [(60, 0.5, 0, 0.7), (300, 0.25, 0.95, 2)])
def test_queue_lowers_the_limit_only_beside_a_free_cache(
    seconds: float, queued: float, least: float, most: float
) -> None:
    engines = Engines("engine-r0-0")
    engines.run(seconds)
    before = engines.slots["router-0"]
    engines.run(10, waiting=queued * before)
    assert least * before <= engines.slots["router-0"] <= most * before
    assert (engines.report["0"].limit == "queue") == (seconds == 60)


def test_limit_far_below_what_fits_grows_fast_once_rollouts_have_ended() -> None:
    engines = Engines("engine-r0-0")
    engines.run(60, kv_each=0.0001, ended=0)
    assert engines.slots["router-0"] == START_PER_ENGINE
    engines.run(30, kv_each=0.0001)
    assert 500 < engines.slots["router-0"] < 1250, "an eighth of what fits"
    before = engines.slots["router-0"]
    engines.run(10, kv_each=0.001)
    assert engines.slots["router-0"] <= before * GROWTH * 1.01, "few more fit"


def test_limit_grows_fourfold_in_a_few_lifetimes_of_short_rollouts() -> None:
    engines = Engines("engine-r0-0")
    engines.run(15, kv_each=0.0001, ended=1000)
    assert engines.slots["router-0"] == START_PER_ENGINE * FAR_GROWTH**3
    engines.run(10, kv_each=0.0001, ended=10_000)
    assert 1250 <= engines.slots["router-0"] < 1250 * GROWTH, "an eighth of what fits"


def test_prefill_limit_differs_from_kv_limit() -> None:
    engines = Engines("prefill-r0-0", "decode-r0-0")
    engines.run(60)
    engines.run(10, prefill_waiting=3000, deferred=50, waiting=50)
    assert engines.report["0"].limit == "prefill"
    engines = Engines("prefill-r0-0", "decode-r0-0")
    engines.run(300, kv_each=0.01)
    assert engines.report["0"].limit == "kv"
    engines = Engines("prefill-r0-0", "decode-r0-0")
    engines.run(100, kv_each=0.0001, deferred=1000, waiting=1000)
    assert engines.report["0"].limit == "growing", "requests that wait for KV from a prefill engine are no queue"


def test_one_prompt_per_sampling_request_may_wait_for_prefill() -> None:
    engines = Engines("prefill-r0-0", "decode-r0-0")
    engines.run(60)
    before = engines.slots["router-0"]
    engines.run(10, prefill_waiting=0.9 * before)
    assert engines.report["0"].limit == "growing" and engines.slots["router-0"] > before
    engines.run(10, prefill_waiting=2.5 * before)
    assert engines.report["0"].limit == "prefill" and engines.slots["router-0"] < before


def test_slot_that_was_just_freed_does_not_stop_growth() -> None:
    engines = Engines("engine-r0-0")
    (sample,) = engines.samples.values()

    def use(left: int) -> int:
        for _ in range(6):
            engines.now += 5
            engines.inflight = {"router-0": engines.slots["router-0"] - left}
            sample["running"], sample["generated"] = engines.inflight["router-0"], sample["generated"] + 1000
            sample["kv_usage"] = 0.001 * sample["running"]
            engines.ended["router-0"] += 10
            engines.observe()
        return engines.slots["router-0"]

    assert use(4) == START_PER_ENGINE and engines.report["0"].limit == "demand"
    assert use(2) > START_PER_ENGINE and engines.report["0"].limit == "growing"


def test_rollouts_that_wait_for_tools_hold_cache() -> None:
    engines = Engines("engine-r0-0")
    for _ in range(60):  # three of four rollouts wait for a tool, for two seconds
        engines.now += 5
        engines.inflight = dict(engines.slots)
        sample = engines.samples["engine-r0-0"]
        sample["running"] = engines.inflight["router-0"] / 4
        sample["kv_usage"] = min(1.0, sample["running"] * 0.01)
        sample["generated"] += 1000
        sample["requests"] += engines.inflight["router-0"]
        engines.ended["router-0"] += 100
        engines.observe()
    assert engines.slots["router-0"] == pytest.approx(CACHE_SHARE / 0.01, abs=1)
    assert engines.report["0"].limit == "cache"


def test_limit_does_not_oscillate_with_agents_at_their_tools() -> None:
    agents = next(workload for workload in WORKLOADS if workload.turns == 30)
    world = World(agents, None)
    world.run(agents.steady_s + LOOK_S)
    starts = range(int(COLD_S), int(agents.steady_s - WINDOW_S) + 1, 60)
    worst = min(world.rate(at, at + WINDOW_S) for at in starts)
    assert worst >= 0.9 * world.rate(COLD_S, agents.steady_s), "tokens a second, in the worst five minutes"


@pytest.mark.parametrize(
    ("workload", "fixed", "least"),
    [
        # With tool calls of 40 s, the rollouts in the cache keep only three requests running.
        (next(each for each in WORKLOADS if each.tool_s == 40), 240, 1.3),
        # The first turns of agents with 100 turns leave most of the cache free, so that too many could start.
        (next(each for each in WORKLOADS if each.turns == 100), 48, 0.9),
    ],
    ids=["long tool calls", "many turns"],
)
def test_limit_follows_tools_and_growth(workload: Workload, fixed: int, least: float) -> None:
    world, other = World(workload, None), World(workload, fixed)
    for each in (world, other):
        each.run(1800 + LOOK_S)
    assert world.rate(COLD_S, 1800) > least * other.rate(COLD_S, 1800), "tokens a second"


@pytest.mark.parametrize(("for_each", "limit"), [(4.0, "cache"), (1.0, "kv")])
def test_evaluation_on_the_same_engines_does_not_change_the_limit(for_each: float, limit: str) -> None:
    """The engines' metrics include the evaluation, which runs on top of training."""
    engines = Engines("engine-r0-0", "engine-r1-0")

    def turn(seconds: float, evaluated: int = 0) -> None:
        for _ in range(round(seconds / 5)):  # one of `for_each` rollouts has a running request
            engines.now += 5
            engines.inflight = dict(engines.slots)
            engines.evaluating = {"router-0": evaluated}
            for router, sample in zip(ROUTERS, engines.samples.values(), strict=True):
                together = engines.inflight[router] + engines.evaluating.get(router, 0)
                sample["running"] = min(98.0, together / for_each)
                sample["waiting"] = together / for_each - sample["running"]
                sample["kv_usage"] = sample["running"] * 0.01
                sample["generated"] += 10 * together
                sample["requests"] += together
                engines.ended[router] += 100
            engines.observe()

    turn(600)
    before = dict(engines.slots)
    assert engines.report["0"].limit == limit
    for seconds in (60, 540):
        turn(seconds, evaluated=50)
        assert engines.slots["router-0"] == pytest.approx(before["router-0"], rel=0.05)
    turn(300)
    assert engines.slots == pytest.approx(before, rel=0.05), "it changed nothing"


def test_limit_of_a_lost_engine_is_removed_and_restored() -> None:
    engines = Engines("engine-r0-0", "engine-r0-1", "engine-r1-0")
    engines.run(300, kv_each=0.01)
    before = dict(engines.slots)
    gone = engines.samples.pop("engine-r0-1")
    engines.observe()
    assert engines.slots["router-0"] == before["router-0"] // 2
    assert engines.slots["router-1"] == before["router-1"]
    engines.samples["engine-r0-1"] = gone
    engines.observe()
    assert engines.slots["router-0"] == pytest.approx(before["router-0"], abs=1), "the engine was only late"
    lone = engines.samples.pop("engine-r1-0")
    engines.observe()
    assert engines.report["1"].limit == "lost" and engines.slots["router-1"] == 0
    engines.samples["engine-r1-0"] = dict.fromkeys(lone, 0.0)
    engines.observe()
    assert engines.slots["router-1"] == START_PER_ENGINE, "a restarted engine has an empty cache"
    engines.run(120, kv_each=0.01)
    assert engines.slots["router-1"] >= 0.9 * before["router-1"], "the size of a rollout is known"


def test_slow_replica_is_limited_until_it_recovers() -> None:
    engines = Engines("engine-r0-0", "engine-r1-0")
    engines.run(300, kv_each=0.01)
    before = dict(engines.slots)
    engines.sample_only(90, 0.1)
    assert engines.report["1"].limit == "slow"
    assert engines.slots["router-1"] < before["router-1"] / 2
    assert engines.slots["router-0"] >= 0.9 * before["router-0"]
    engines.sample_only(120, 1)
    assert engines.report["1"].limit != "slow"
    assert engines.slots["router-1"] >= 0.9 * before["router-1"]


@pytest.mark.parametrize("restarted", [False, True])
def test_replica_without_tokens_for_minutes_is_tried_again(restarted: bool) -> None:
    engines = Engines("engine-r0-0", "engine-r1-0")
    engines.run(300, kv_each=0.01)
    before = dict(engines.slots)
    engines.sample_only(600, 0)
    assert engines.report["1"].limit == "slow" and engines.slots["router-1"] == 1
    if restarted:
        engines.samples["engine-r1-0"] = dict.fromkeys(engines.samples["engine-r1-0"], 0.0)
        engines.observe()
        assert engines.slots["router-1"] == START_PER_ENGINE, "the speed of the old engine does not count"
        for _ in range(6):
            engines.sample_only(5, 1)
            assert engines.report["1"].limit != "slow", "a new engine is not slow"
    else:
        engines.sample_only(90, 1)
        assert engines.slots["router-1"] >= 0.9 * before["router-1"]


def test_replicas_that_were_idle_for_hours_are_not_compared() -> None:
    engines = Engines("engine-r0-0", "engine-r1-0")
    engines.run(60)
    for _ in range(6000):
        engines.now += 5
        engines.inflight = {}
        engines.observe()
    engines.run(5, generated=0)
    assert all(load.limit != "slow" for load in engines.report.values())


def test_max_inflight_is_reported_as_the_limit() -> None:
    engines = Engines("engine-r0-0", bound=START_PER_ENGINE)
    engines.run(10)
    engines.inflight = {"router-0": START_PER_ENGINE}
    engines.observe()
    assert engines.report["0"].limit == "bound"
    engines.controller.drop("router-0")
    assert engines.slots == {}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("fullest", [0.0, 1.0])
def test_limits_stay_in_bounds_for_any_metrics(seed: int, fullest: float) -> None:
    source = random.Random(seed)
    engines = Engines("engine-r0-0", "engine-r0-1", "prefill-r1-0", "decode-r1-0")
    names, most = list(engines.samples), 0
    for _ in range(400):
        engines.now += source.choice([0.0, 5.0, 20.0])
        for sample in engines.samples.values():
            for name in GAUGES:
                sample[name] = (
                    source.choice([0.0, 1.0, 0.5, 1000.0]) if name != "kv_usage" else fullest * source.random()
                )
            for name in COUNTERS:
                sample[name] += source.choice([0.0, 1.0, 1e5])
        victim = source.choice(names)
        match source.randrange(8):
            case 0:
                engines.samples.pop(victim, None)
            case 1:
                engines.samples[victim] = dict.fromkeys((*GAUGES, *COUNTERS), 0.0)
            case 2:
                engines.samples.setdefault(victim, dict.fromkeys((*GAUGES, *COUNTERS), 0.0))
        before = engines.slots
        most = max(most, *before.values(), 0)
        engines.inflight = {router: source.randrange(limit + 2) for router, limit in before.items()}
        engines.ended["router-0"] += source.randrange(5)
        engines.observe()
        for replica, load in engines.report.items():
            answering = sum(f"-r{replica}-" in name and not name.startswith("prefill") for name in engines.samples)
            if load.limit != "slow":
                assert load.places >= min(FLOOR_PER_ENGINE * answering, 1)
            assert load.places <= (FAR_GROWTH * most + START_PER_ENGINE * answering if answering else 0)


def make_dispatcher(slots: dict[str, int], max_inflight: int = 64) -> Dispatcher:
    dispatcher = Dispatcher(
        DispatchLimits({"e": 4}, max_inflight, max_inflight, 8, 100, {"e": 1.0}), ROUTERS, "run.1", "i"
    )
    dispatcher.version = 0
    dispatcher.replicas.limits = slots
    return dispatcher


def test_rollouts_go_to_the_replica_with_free_slots() -> None:
    dispatcher = make_dispatcher({"router-0": 2, "router-1": 20})
    jobs = []
    while job := dispatcher.next_job({"e"}):
        jobs.append(job)
    assert Counter(job.router for job in jobs) == {"router-0": 2, "router-1": 20}
    assert dispatcher.replicas.load == {"router-0": 2, "router-1": 20}
    dispatcher.lost(jobs[0].id)
    assert dispatcher.next_job({"e"}) is not None and dispatcher.next_job({"e"}) is None
    assert dispatcher.drop_router("router-0")
    assert dispatcher.next_job({"e"}) is None, "the other one is full"
    dispatcher.replicas.limits = {"router-1": 22}
    again = [dispatcher.next_job({"e"}), dispatcher.next_job({"e"})]
    assert all(job is not None and job.router == "router-1" for job in again)
    assert dispatcher.counts["dispatched"] == dispatcher.inflight + dispatcher.counts["lost"]


def test_group_waits_for_its_replica_only_for_a_while() -> None:
    """The replica's cache holds the prompt; another one would hold it twice."""
    dispatcher = make_dispatcher({"router-0": 5, "router-1": 5})
    jobs = {}
    while job := dispatcher.next_job({"e"}):
        jobs[job.id] = job
    home = {job.group: job.router for job in list(jobs.values())[:8]}
    assert sorted(home.values()) == ROUTERS, "each replica has one group, and the start of another"

    def ends(router: str) -> Job:
        name = next(name for name, job in jobs.items() if job.router == router)
        del jobs[name]
        if group := dispatcher.finished(name, ()):
            dispatcher.rejected(group, "counted")
        job = dispatcher.next_job({"e"})
        assert job is not None
        jobs[job.id] = job
        return job

    started = {job.router: job.group for job in jobs.values()}
    for router in ("router-1", "router-0", "router-1", "router-0"):
        job = ends(router)
        assert (job.group, job.router) == (started[router], router)
    dispatcher.replicas.limits = {"router-0": 0, "router-1": 10}
    waiting = started["router-0"]
    groups = [ends("router-1").group for _ in range(24)]
    assert waiting in groups, "a full replica does not hold back its groups"


def test_limit_grows_while_nearly_all_rollouts_wait_for_tools() -> None:
    """Sixteen rollouts that sample one second per minute keep a quarter of a request running."""
    engines = Engines("engine-r0-0", "prefill-r1-0", "decode-r1-0")

    def run(seconds: float, generated: float, prefill_waiting: float = 0.0) -> None:
        for _ in range(round(seconds / 5)):
            engines.now += 5
            engines.inflight = dict(engines.slots)
            for name, sample in engines.samples.items():
                sample["running"] = 0.25 if not name.startswith("prefill") else 0.0
                sample["waiting"] = prefill_waiting if name.startswith("prefill") else 0.0
                sample["generated"] += generated if sample["running"] else 0
            engines.ended += Counter(ROUTERS) if generated else Counter()
            engines.observe()

    run(60, generated=0)
    assert set(engines.slots.values()) == {START_PER_ENGINE}, "no tokens: more rollouts would not help"
    run(60, generated=100, prefill_waiting=4)
    assert engines.slots["router-0"] >= START_PER_ENGINE * GROWTH ** (40 / GROWTH_S)
    assert engines.slots["router-1"] <= START_PER_ENGINE, "more rollouts would only wait"


@pytest.mark.parametrize("requests", [32, 64, 256])
def test_headroom_suffices_for_few_large_and_many_small_requests(requests: int) -> None:
    engines = Engines("engine-r0-0")
    engines.run(300, kv_each=1 / requests)
    assert engines.report["0"].limit == "kv"
    sizes = np.random.default_rng(0).uniform(0, 2 / requests, (20_000, engines.slots["router-0"]))
    assert (sizes.sum(axis=1) > 1).mean() < 0.03
    assert engines.slots["router-0"] > 0.75 * requests


def test_size_is_predicted_for_half_a_lifetime() -> None:
    """Fifty rollouts that start together grow by 0.0002 per second. After 100 s, one ends every two seconds."""
    model, ended = RolloutModel(), 0

    def observe(size: float, new: int) -> float:
        nonlocal ended
        ended += new
        look = Look(10.0, 50, 50, running=50, waiting=0, prefill_waiting=0, kv=50 * size, generated=1, answered=new)
        model.observe([look], 50, ended, 10.0)
        return CACHE_SHARE / model.bounds[1]

    for step in range(10):
        size = observe(0.004 + 0.002 * step, 0)
    assert size > 0.022, "more than they hold now"
    assert model.first_limit == START_PER_ENGINE
    for _ in range(200):
        size = observe(0.014, 5)
    assert model.first_limit == math.inf
    assert model.lifetime == pytest.approx(100, rel=0.1) and size == pytest.approx(0.014, rel=0.05)
