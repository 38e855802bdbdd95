"""The latency and KV model of an emulated engine, with a simulated clock."""

from __future__ import annotations

from primeslurm.testbed.emulated import rollout_script
from primeslurm.testbed.emulated.scheduler import PrefixCache, Request, Scheduler

TICK_S = 0.05


def tokens(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def seconds_until_done(scheduler: Scheduler, *requests: Request) -> float:
    """Advance in ticks until all these requests are done."""
    left, spent = set(requests), 0.0
    while left:
        assert spent < 1000
        left -= set(scheduler.advance(TICK_S))
        spent += TICK_S
    return spent


def test_kv_is_never_overdrawn_and_preempted_requests_finish() -> None:
    scheduler = Scheduler(blocks=12, max_running=8)
    requests = [Request(tokens(48, 100 * i), "", 60) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    left = set(requests)
    for _ in range(2000):
        left -= set(scheduler.advance(TICK_S))
        assert scheduler.used_blocks <= 12
        if not left:
            break
    assert not left and scheduler.counts["preemptions"] > 0
    assert all(request.sampled == 60 for request in requests)
    assert scheduler.counts["generation_tokens"] == 240


def test_cached_prefix_is_not_prefilled_again() -> None:
    scheduler = Scheduler(1000, 8)
    first = Request(tokens(160), "run:1", 1)
    scheduler.add(first)
    seconds_until_done(scheduler, first)
    scheduler.finished(first, [7])
    for salt, hits in (("run:1", 160), ("run:2", 0)):
        before = scheduler.counts["prefix_hits"]
        again = Request([*tokens(160), 7, 8, 9], salt, 1)
        scheduler.add(again)
        seconds_until_done(scheduler, again)
        assert scheduler.counts["prefix_hits"] - before == hits


def test_least_recently_used_prefix_is_evicted_first() -> None:
    cache = PrefixCache(blocks=4)
    cache.hold("", tokens(32))
    cache.hold("", tokens(32, 500))
    assert cache.hit("", tokens(33)) == 32
    cache.hold("", tokens(32, 900))
    assert (cache.hit("", tokens(33)), cache.hit("", tokens(33, 500))) == (32, 0)


def test_completion_reports_the_version_of_each_token() -> None:
    scheduler, request = Scheduler(1000, 8), Request(tokens(16), "", 40)
    scheduler.version = "3"
    scheduler.add(request)
    while request.sampled < 10:
        scheduler.advance(TICK_S)
    switched = request.sampled
    scheduler.version = "4"
    seconds_until_done(scheduler, request)
    assert request.spans == [("3", 0, switched), ("4", switched, 40)]


def test_rollouts_of_an_example_share_its_prompt_and_newer_policies_do_better() -> None:
    scripts = [rollout_script.script(0, "swe", 5, f"job-{i}") for i in range(200)]
    assert all(script.prompt == scripts[0].prompt for script in scripts)
    assert rollout_script.script(0, "swe", 5, "job-3") == scripts[3]
    turns = [len(script.tool_outputs) + 1 for script in scripts]
    assert min(turns) == 1 and max(turns) >= 3 * (sum(turns) / len(turns)), "no long tail"
    means = [sum(rollout_script.reward(f"job-{i}", version) for i in range(300)) / 300 for version in (0, 8, 24)]
    assert means[0] < 0.35 < means[1] < 0.85 < means[2]
