"""Running totals of thousands of groups agree with a scan of all groups."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from primeslurm.orchestrator.dispatch.completion_forecast import REFRESH_S, CompletionForecast
from primeslurm.orchestrator.dispatch.group_queues import OpenGroup, OpenGroups, ReadyGroups, group_id
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


def group(example: int, version: int, environment: str = "a", size: int = 4) -> OpenGroup:
    return OpenGroup(group_id(environment, example), environment, example, version, "r", size, list(range(size)), None)


@pytest.mark.parametrize("seed", range(20))
def test_open_groups_agree_with_a_full_scan(seed: int) -> None:
    source, groups = random.Random(seed), OpenGroups()
    for example in range(300):
        action = source.choice(["add", "add", "take", "take", "take", "again", "grow", "version", "remove"])
        present = list(groups.values())
        if action == "add" or not present:
            groups.add(group(example, source.randrange(5), source.choice("ab"), source.choice((2, 4))))
        elif action == "take":
            next_group = groups.next(source.choice(({"a"}, {"b"}, {"a", "b"})))
            if next_group is not None:
                next_group.jobs[f"{next_group.id}/{example}"] = groups.take(next_group)
        elif action == "again" and (busy := [each for each in present if each.jobs]):
            lost = source.choice(busy)
            groups.redispatch(lost, lost.jobs.popitem()[1])
        elif action == "grow":
            groups.grow(source.choice(present))
        elif action == "version":
            groups.set_version(source.choice(present), source.randrange(5))
        elif action == "remove":
            groups.remove(source.choice(present))
        for labels in ({"a"}, {"b"}, {"a", "b"}):
            first = next((each for each in groups.values() if each.to_dispatch and each.environment in labels), None)
            assert groups.next(labels) is first
        for oldest in range(6):
            assert groups.pending(oldest) == sum(each.size for each in groups.values() if each.version >= oldest)
            assert groups.before(oldest) == [each for each in groups.values() if each.version < oldest]
            assert groups.at(oldest) == sum(each.size for each in groups.values() if each.version == oldest)


def test_incremental_forecast_agrees_with_a_refresh() -> None:
    source, now = random.Random(1), 0.0
    ahead, groups = CompletionForecast(["a", "b"], lambda: now), OpenGroups()
    for example in range(400):
        now += 0.01
        new = group(example, 0, source.choice("ab"))
        groups.add(new)
        ahead.opened(new)
        for index in new.to_dispatch[:3]:
            new.jobs[f"{new.id}/{index}"] = index
            ahead.started(new, f"{new.id}/{index}")
        if example > 20:
            gone = source.choice(list(groups.values()))
            for job in gone.jobs:
                ahead.ended(gone, job, finished=True)
            groups.remove(gone)
            ahead.closed(gone)
        ahead.batch_formed()
        now += 0.001
        ahead.step_done()
        incremental = ahead.landing(groups)
        if example % 50 == 49:
            now += REFRESH_S
            assert ahead.landing(groups) >= 0
            again = ahead.landing(groups)
            assert again == pytest.approx(sum(ahead._landing[name] for name in groups)), "closed groups do not count"
            assert set(ahead._landing) == set(groups)
        assert incremental == pytest.approx(sum(ahead._landing.values()))


@pytest.mark.parametrize("seed", range(5))
def test_ready_groups_agree_with_a_full_scan(seed: int) -> None:
    source = random.Random(seed)
    ready = ReadyGroups(lambda each: each.opened_version)
    for example in range(200):
        rollouts = ((),) * source.choice((2, 4))
        new = RolloutGroup(group_id("a", example), "a", example, source.randrange(5), rollouts)
        action, some = source.choice(["add", "add", "take", "put back", "replace"]), [*ready][:2]
        if action == "add" or not some:
            ready.add(new)
        elif action == "take":
            ready.remove(some)
        elif action == "put back":
            ready.remove(some)
            ready.put_back(some)
            assert [*ready][: len(some)] == some
        else:
            other = replace(some[0])
            ready.replace(some[0], other)
            assert next(iter(ready)) is other
        assert ready.rollouts == sum(each.size for each in ready)
        for version in range(6):
            assert ready.before(version) == [each for each in ready if each.opened_version < version]
    ready.sort()
    assert [each.opened_version for each in ready] == sorted(each.opened_version for each in ready)
