"""Progress, stalls and metrics of a run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from primeslurm.orchestrator.rollouts.job_protocol import JobFailure
from primeslurm.orchestrator.telemetry.batch_metrics import batch_metrics
from primeslurm.orchestrator.telemetry.progress_monitor import ProgressMonitor, StallError
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.inference import EngineParallel, Inference
from primeslurm.records.journal import Journal
from primeslurm.records.state import OrchestratorState
from tests.support.clock import Clock
from tests.support.recipes import recipe_data
from tests.unit.orchestrator.test_packing import group

RECIPE = Recipe.model_validate(recipe_data(orchestrator={"batch_size": 128, "group_size": 8, "stall_timeout_s": 100}))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(tmp_path: Path, clock: Clock) -> ProgressMonitor:
    return ProgressMonitor(RECIPE, Journal(tmp_path, "orchestrator"), dict, clock)


def test_batch_metrics() -> None:
    row = batch_metrics([group([3, 70], [1.0, 0.0]), group([3, 3], [0.5, 0.5])], step=4, seq_len=64)
    assert row["reward/mean"] == 0.5 and row["groups/zero_signal"] == 0.5
    assert row["staleness/mean"] == row["staleness/max"] == 3.0
    assert row["rollouts/longer_than_seq_len"] == 0.25 and row["e/reward"] == 0.5
    assert "router_replay/repeated" not in row


def test_fractions_of_repeated_and_unknown_experts_are_metrics() -> None:
    whole = group([3, 7], [1.0, 0.0])
    first, second = whole.rollouts
    info = msgspec.structs.replace(first[0].info, repeated_experts=2, unknown_experts=3)
    some = replace(whole, rollouts=((replace(first[0], info=info),), second))
    row = batch_metrics([some], step=4, seq_len=64)
    assert row["router_replay/repeated"] == 0.2 and row["router_replay/unknown"] == 0.3


def check(watch: ProgressMonitor, suspect: str = "nobody") -> None:
    watch.check_stall(lambda: suspect, lambda job: False, ())


def test_stall_ends_the_attempt_and_names_the_suspect(watch: ProgressMonitor, clock: Clock, tmp_path: Path) -> None:
    clock.now = 1000.0
    check(watch)  # nothing has begun
    watch.policy_wanted(0)
    clock.now += 2
    watch.policy_current(0)
    clock.now += 99
    check(watch)
    clock.now += 2
    with pytest.raises(StallError, match="the culprit") as caught:
        check(watch, "the culprit")
    assert caught.value.exit_code == 76
    events = [json.loads(line) for line in (tmp_path / "events/orchestrator.jsonl").read_text().splitlines()]
    assert events[-1]["kind"] == "stall" and events[-1]["suspect"] == "the culprit"


def test_row_has_the_load_of_each_role(watch: ProgressMonitor) -> None:
    for running in (8.0, 0.0, 8.0, 8.0):
        watch.engines_seen({"decode-r0-0": {"running": running, "waiting": 0.0, "kv_usage": 0.1}})
    row = watch.step_metrics(Counter(), {"inflight": 7}, version=3)
    assert row["engines/decode/busy_mean"] == 0.75 and row["policy/version"] == 3 and row["queue/inflight"] == 7


def test_row_has_gpu_hours_and_idle_time_of_each_role(clock: Clock, tmp_path: Path) -> None:
    recipe = RECIPE.model_copy(update={"inference": Inference(parallel=EngineParallel(tp=4))})
    engines = dict.fromkeys(("prefill-r0-0", "decode-r0-0", "decode-r0-1", "router-0"), "http://x")
    watch = ProgressMonitor(recipe, Journal(tmp_path, "orchestrator"), lambda: engines, clock)
    for generated in (0.0, 800.0):
        clock.now += 10
        watch.engines_seen({f"decode-r0-{i}": {"running": generated / 100, "generated": generated} for i in (0, 1)})
    clock.now += 340
    row = watch.step_metrics(Counter(), {}, version=0)
    # Engines that do not answer cost as much as others.
    assert row["engines/prefill/gpu_hours"] == pytest.approx(4 * 360 / 3600)
    assert row["engines/decode/gpu_hours"] == pytest.approx(8 * 360 / 3600)
    assert row["engines/decode/idle_fraction"] == 0.5
    assert row["engines/decode/generated_per_s_per_gpu"] == pytest.approx(2 * 80 / 8)
    clock.now += 36
    assert watch.step_metrics(Counter(), {}, version=0)["engines/prefill/gpu_hours"] == pytest.approx(4 * 36 / 3600)


def test_state_shows_progress_of_engines(watch: ProgressMonitor, clock: Clock, tmp_path: Path) -> None:
    markers = []
    for tokens in (0.0, 100.0, 100.0):
        clock.now += 5.0
        watch.engines_seen({"decode-r0-0": {"generated": tokens}})
        watch.write_state(OrchestratorState(version=0))
        state = msgspec.json.decode((tmp_path / "state/orchestrator.json").read_bytes(), type=OrchestratorState)
        markers.append(state.marker)
    assert markers[0] != markers[1] == markers[2]


def test_run_does_not_stall_while_engines_compute(watch: ProgressMonitor, clock: Clock) -> None:
    watch.policy_current(0)
    tokens = 0.0
    for _ in range(2 * 720):  # two hours
        clock.now += 5.0
        tokens += 100.0
        if clock.now == 3600.0:
            tokens = 50.0  # an engine was restarted, and counts anew
        watch.engines_seen({"decode-r0-0": {"generated": tokens, "running": 8.0}, "decode-r0-1": {"generated": 7.0}})
        check(watch)
    watch.engines_seen({"prefill-r0-0": {"prompted": 10.0}})
    for prompted in (500.0, 900.0):  # a long prompt, of which nothing is generated yet
        clock.now += 60.0
        watch.engines_seen({"prefill-r0-0": {"prompted": prompted}})
        check(watch)
    stuck = {"decode-r0-0": {"generated": tokens, "running": 8.0, "waiting": 2.0}}
    for _ in range(21):
        watch.engines_seen(stuck)
        clock.now += 5.0
    with pytest.raises(StallError, match=r"no token was generated.*8 running and 2 waiting requests; suspect: them"):
        check(watch, "them")
    watch.engines_seen({"decode-r0-0": {"generated": tokens}})
    with pytest.raises(StallError, match="engines have no requests"):
        check(watch)


def test_attempt_ends_if_all_rollouts_fail(watch: ProgressMonitor) -> None:
    for _ in range(4 * RECIPE.orchestrator.batch_size - 1):
        watch.rollout_failed("j", JobFailure("ZeroDivisionError"))
    check(watch)
    watch.rollout_failed("j", JobFailure("ZeroDivisionError"))
    with pytest.raises(StallError, match="ZeroDivisionError"):
        check(watch)


def test_attempt_ends_if_all_groups_are_rejected(watch: ProgressMonitor, clock: Clock, tmp_path: Path) -> None:
    groups = 4 * RECIPE.orchestrator.batch_size // RECIPE.orchestrator.group_size
    for i in range(3 * groups):  # rollouts finish all the time
        clock.now += 1
        watch.policy_current(i)
        watch.group_rejected("zero_advantage" if i % 2 else "length", RECIPE.orchestrator.group_size)
        if i == groups:
            watch.group_kept()
        if clock.now < groups + 1 + RECIPE.orchestrator.stall_timeout_s:
            check(watch)
    with pytest.raises(StallError, match=r"length: \d+.*none was kept for 100 s: no batch can form"):
        check(watch)
    events = [json.loads(line) for line in (tmp_path / "events/orchestrator.jsonl").read_text().splitlines()]
    assert events[-1]["kind"] == "stall" and events[-1]["suspect"] == "algorithm"
