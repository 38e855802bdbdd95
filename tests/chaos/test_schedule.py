"""Schedules depend only on their seed."""

from __future__ import annotations

from collections import Counter

from tests.chaos.kinds import KINDS, switched_on
from tests.chaos.schedule import schedule

NAMES = ["a", "b", "c", "d"]


def test_a_seed_repeats_its_schedule() -> None:
    first = schedule(7, 40, NAMES, 0.3)
    assert first == schedule(7, 40, NAMES, 0.3) and first != schedule(8, 40, NAMES, 0.3)
    assert first[0][0].rng().random() == first[0][0].rng().random()


def test_every_kind_is_drawn_equally_often() -> None:
    rounds = schedule(1, 40, NAMES, 0.3)
    assert Counter(fault.kind for round_ in rounds for fault in round_) == dict.fromkeys(NAMES, 10)


def test_faults_overlap_as_often_as_asked() -> None:
    assert {len(round_) for round_ in schedule(1, 40, NAMES, 0.0)} == {1}
    pairs = [round_ for round_ in schedule(1, 400, NAMES, 0.5) if len(round_) == 2]
    assert 100 <= len(pairs) <= 170
    assert all(first.after_s == 0.0 and second.after_s > 0.0 for first, second in pairs)


def test_disabled_kinds_are_left_out() -> None:
    assert set(switched_on(short=True)) < set(switched_on(short=False)) <= set(KINDS)
    assert all(KINDS[name].off == "" for name in switched_on(short=False))
