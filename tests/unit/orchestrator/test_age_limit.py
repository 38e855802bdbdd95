"""The age limit of groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primeslurm.orchestrator.dispatch.limits import AgeLimit
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.recipe.sections.staleness import Staleness
from tests.unit.orchestrator.test_dispatch import rollout

JOB = Job("a-00000000/0-i", "a-00000000", "a", 0, 3, "r0", "s")
GROUP = RolloutGroup("a-00000000", "a", 0, 3, (rollout(JOB, 3), rollout(JOB, 5)))
"""Opened at version 3; version 5 sampled its newest token."""


@pytest.mark.parametrize(("rule", "version"), [("drop", 3), ("partial", 3), ("mask", 5), ("carry", 5)])
def test_group_may_be_trained_until_its_version_is_too_old(rule: str, version: int) -> None:
    limit = AgeLimit(2, Staleness(rule=rule))
    last = version + 2 + 1
    assert limit.version_of(GROUP) == version and limit.oldest_version(last) == version
    assert [limit.is_last_chance(GROUP, step) for step in (last - 1, last, last + 1)] == [False, True, True]
    assert [limit.is_too_old(GROUP, step) for step in (last, last + 1)] == [False, True]


def test_continuations_and_returned_examples_finish_late() -> None:
    limit = AgeLimit(2, was_returned={("a", 1)}.__contains__)
    assert not limit.finishes_late("a", 0, "a-00000000") and limit.version_of(GROUP) == 3
    assert limit.finishes_late("a", 0, "a-00000000.1001") and limit.finishes_late("a", 1, "a-00000001")
    assert limit.version_of(replace(GROUP, id="a-00000000.1001")) == 5, "its newest token counts"


def test_old_tokens_are_masked() -> None:
    masked = AgeLimit(0).mask_old_tokens(GROUP, 6)
    assert [bool(sequence.mask.any()) for sequence in masked.sequences] == [False, True]
