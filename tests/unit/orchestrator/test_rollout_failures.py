"""Which failures of an environment end the run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.support.ports import free_port
from primeslurm.base.errors import signature
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.evaluation.evaluation_orchestrator import EvaluationOrchestrator
from primeslurm.orchestrator.rollouts.job_protocol import Cause, Job, JobFailure
from primeslurm.orchestrator.rollouts.worker_pool import RolloutEnded, WorkerUnusable
from primeslurm.orchestrator.telemetry.progress_monitor import UnrecoverableError
from primeslurm.orchestrator.telemetry.rollout_failures import (
    FEW_FAILURES,
    FEW_KILLERS,
    MANY_KILLERS,
    MANY_OVERFLOWS,
    MAX_KINDS,
    Hopeless,
    RolloutFailures,
    headline,
)
from primeslurm.orchestrator.worker.generate_endpoint import NO_ANSWER
from primeslurm.recipe import Recipe
from primeslurm.records.state import FailedRollouts

WORKERS = {"a": 2, "b": 1}
ERROR = "RolloutError: TaskError: reward 'right': KeyError: 'unknown-{}'"


@dataclass
class Flight:
    """Rollouts under way, with a clock that is moved by hand."""

    failures: RolloutFailures = field(default_factory=lambda: RolloutFailures(1000, WORKERS))
    now: float = 1000.0
    running: set[str] = field(default_factory=set)
    served: set[str] = field(default_factory=lambda: {"a", "b"})

    def start(self, task: int, member: int = 0, environment: str = "a") -> str:
        group = f"{environment}-{task:08d}"
        job = Job(f"{group}/{member}-x{len(self.running)}-{self.now}", group, environment, task, 0, "r", "s")
        self.failures.started(job, self.now)
        self.running.add(job.id)
        return job.id

    def fail(self, job: str, error: str = ERROR, cause: Cause = "environment") -> None:
        self.running.discard(job)
        self.failures.failed(job, error.format(job[-3:]), self.now, cause)

    @property
    def verdict(self) -> Hopeless | None:
        return self.failures.hopeless(self.now, self.running.__contains__, self.served)


def test_equal_failures_of_several_tasks_end_the_run_soon() -> None:
    flight = Flight()
    began = flight.now
    while flight.verdict is None:
        jobs = [flight.start(task, member) for task in range(4) for member in range(4)]
        flight.now += 0.5
        for job in jobs:
            flight.fail(job)
        assert flight.now < began + 20
    verdict = flight.verdict
    assert verdict is not None and verdict.environment == "a" and verdict.failures >= FEW_FAILURES
    assert verdict.error.startswith("TaskError: reward 'right': KeyError: 'unknown-")
    assert "environment a fails every time" in str(verdict) and flight.now - began < 8


STALE = f"RolloutError: ProviderError: {NO_ANSWER}: http://r/generate: 503: stale"


@pytest.mark.parametrize(
    ("tasks", "error", "cause"),
    [pytest.param(1, ERROR, "environment", id="one broken task"), pytest.param(100, STALE, "engine", id="engines")],
)
def test_failures_that_do_not_show_a_broken_environment_are_tolerated(tasks: int, error: str, cause: Cause) -> None:
    flight = Flight()
    for number in range(100):
        flight.fail(flight.start(number % tasks), error, cause)
        flight.now += 1
    assert flight.verdict is None


def test_run_waits_for_rollouts_that_outlive_the_failures() -> None:
    flight = Flight()
    jobs = [flight.start(task) for task in range(512)]
    flight.now += 1
    for job in jobs[:60]:
        flight.fail(job)
    assert flight.verdict is None, "the others have not had their chance"
    flight.now += 3600
    for task in range(1000, 1100):
        job = flight.start(task)
        flight.now += 1
        flight.fail(job)
    assert flight.verdict is None, "they still run"
    for job in jobs[60:]:
        flight.fail(job)
    assert flight.verdict is None, "failures take an hour: those that were started lately may not"
    flight.now += 4000
    assert flight.verdict is not None, "after twice that all have failed"


def test_many_failures_end_the_run_even_if_rollouts_run() -> None:
    flight = Flight(RolloutFailures(60, WORKERS))
    for task in range(60):
        assert flight.verdict is None
        flight.start(1000 + task)
        flight.fail(flight.start(task))
    assert flight.verdict is not None


def test_failures_after_a_success_do_not_end_the_run() -> None:
    flight = Flight()
    job = flight.start(0)
    flight.failures.finished(job, "a", flight.now)
    for task in range(1, 500):
        flight.fail(flight.start(task))
        flight.now += 1
    assert flight.verdict is None
    assert flight.failures.streak()[:2] == ("a", 499)
    resumed = Flight(RolloutFailures(1000, WORKERS, ["a"]))
    for task in range(100):
        resumed.fail(resumed.start(task))
        resumed.now += 1
    assert resumed.verdict is None, "a step was trained in an earlier attempt"


def test_kinds_of_failures_are_counted_separately() -> None:
    flight = Flight()
    for task in range(7):
        flight.fail(flight.start(task), "RolloutError: SandboxError: image 'a' is not there")
        flight.fail(flight.start(task), "RolloutError: TaskError: another")
        flight.now += 5
    assert flight.verdict is None
    flight.fail(flight.start(9), "RolloutError: SandboxError: image 'b' is not there")
    flight.now += 10
    verdict = flight.verdict
    assert verdict is not None and verdict.error == "SandboxError: image 'b' is not there"


def test_failing_environment_is_named_while_another_works() -> None:
    flight = Flight()
    for task in range(20):
        job = flight.start(task, environment="b")
        flight.failures.finished(job, "b", flight.now)
        flight.fail(flight.start(task))
        flight.now += 1
    verdict = flight.verdict
    assert verdict is not None and verdict.environment == "a"


def test_cancelled_and_lost_rollouts_are_not_waited_for() -> None:
    flight = Flight()
    jobs = [flight.start(task) for task in range(16)]
    flight.now += 1
    for job in jobs[1:]:
        flight.fail(job)
    flight.now += 60
    assert flight.verdict is None, "one still runs"
    flight.running.clear()
    assert flight.verdict is not None


def test_environment_whose_workers_never_start_ends_the_run() -> None:
    flight = Flight()
    flight.failures.not_started("b", 0, "ToolsetError: no index", flight.now)
    flight.served = set()
    assert flight.verdict is None, "it is started again first"
    flight.failures.not_started("b", 0, "ToolsetError: no index", flight.now)
    assert flight.verdict == Hopeless("b", "ToolsetError: no index", 2)
    flight.served = {"b"}
    assert flight.verdict is None
    for _ in range(5):
        flight.failures.not_started("a", 1, "ToolsetError: no index", flight.now)
    assert flight.verdict is None, "its other worker may be about to serve"
    flight.failures.not_started("a", 0, "ToolsetError: no index", flight.now)
    assert flight.verdict == Hopeless("a", "ToolsetError: no index", 6)


TRACEBACK = """Traceback (most recent call last):
  File "/x/program.py", line 93, in main
    raise ValueError("DefaultRenderer does not support tools")
ValueError: DefaultRenderer does not support tools
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("RolloutError: nothing was sampled", "nothing was sampled"),
        (
            f"RolloutError: HarnessError: harness 'bash' exited 1: {TRACEBACK}",
            "HarnessError: harness 'bash' exited 1: ValueError: DefaultRenderer does not support tools",
        ),
        (
            "HarnessError: harness 'bash' exited 1: 3, in main\n  File \"x\", line 2\nOSError: no index\n",
            "HarnessError: harness 'bash' exited 1: OSError: no index",
        ),
        (
            "RolloutError: ToolsetError: tool server 'wiki' ended: loading\n\nno such index: /data/x",
            "ToolsetError: tool server 'wiki' ended: loading: no such index: /data/x",
        ),
        ("", ""),
    ],
)
def test_headline_of_an_error(error: str, told: str) -> None:
    assert headline(error) == told


def test_numbers_paths_and_quotes_do_not_change_the_kind() -> None:
    one = "SandboxError: image 'astropy:1.2' is not in /cache/4f5e6a7b, after 12 s"
    other = "SandboxError: image 'django:5' is not in /tmp/9a8b7c6d, after 7 s"
    assert signature(one) == signature(other)
    assert signature(one) != signature("SandboxError: no disk")


@pytest.mark.parametrize("starts", [True, False])
def test_standalone_evaluation_ends_if_its_environment_fails(starts: bool, tmp_path: Path) -> None:
    evaluation = {"environments": [{"id": "reverse-text", "name": "held-out"}]}
    fields = {"name": "t", "task": "eval", "seq_len": 64, "model": {"path": "m"}, "evaluation": evaluation}
    arguments = OrchestratorArguments(tmp_path, 1, "run", "", f"tcp://127.0.0.1:{free_port()}", ["router-0"], [])
    now = 0.0

    async def ends() -> None:
        nonlocal now
        server = EvaluationOrchestrator(Recipe.model_validate(fields), arguments, clock=lambda: now)
        server._evaluator.follow(0, {})
        for _ in range(FEW_FAILURES):
            server._check()
            if not starts:
                server._handle(WorkerUnusable("held-out", 0, "no such table"))
                continue
            job = server._evaluator.next_job({"held-out"}, 0)
            assert job is not None
            server._failures.started(job, now)
            now += 1
            server._handle(RolloutEnded(job.id, JobFailure(ERROR)))
        now += 60
        server._check()

    with pytest.raises(UnrecoverableError, match="environment held-out fails every time"):
        asyncio.run(ends())
    state = json.loads((tmp_path / "attempts/1/state/orchestrator.json").read_text())
    assert "environment held-out fails every time" in state["failure"]


def test_report_has_the_most_frequent_reason() -> None:
    flight = Flight()
    for task in range(5):
        flight.fail(flight.start(task), f"RolloutError: SandboxError: image 'a{task}' is not there")
    flight.fail(flight.start(5), "ValueError: x")
    flight.fail(flight.start(6, environment="b"), "RolloutError: the prompt is too long", "prompt")
    flight.failures.given_up("b", flight.now)
    assert flight.failures.report == {
        "a": FailedRollouts(6, 5, "SandboxError: image 'a4' is not there"),
        "b": FailedRollouts(1, 1, "the prompt is too long", tasks_given_up=1),
    }


def test_number_of_counted_kinds_is_bounded() -> None:
    flight = Flight()
    for task in range(3 * MAX_KINDS):
        word = "".join(chr(ord("a") + int(digit)) for digit in str(task))
        flight.fail(flight.start(task), f"{word}Error: {word}")
    known = flight.failures._environments["a"]
    assert len(known.reasons) <= MAX_KINDS and known.total == 3 * MAX_KINDS


def test_only_very_many_too_long_prompts_end_the_run() -> None:
    flight = Flight()
    for task in range(MANY_OVERFLOWS - 1):
        flight.fail(flight.start(task), "PromptError: the prompt has 99 tokens", "prompt")
        flight.now += 10
    assert flight.verdict is None and flight.failures.streak()[1] == 0
    flight.fail(flight.start(MANY_OVERFLOWS), "PromptError: the prompt has 99 tokens", "prompt")
    verdict = flight.verdict
    assert verdict is not None and "the prompt has 99 tokens" in str(verdict)


@pytest.mark.parametrize(("worked", "enough"), [(False, FEW_KILLERS), (True, MANY_KILLERS)])
def test_environment_whose_tasks_kill_workers_ends_the_run(worked: bool, enough: int) -> None:
    flight = Flight(RolloutFailures(1000, WORKERS, hopeful=["a"] if worked else []))
    for _ in range(enough - 1):
        flight.failures.given_up("a", flight.now, killer="3 environment workers died while they ran it")
    assert flight.verdict is None
    flight.failures.given_up("a", flight.now, killer="3 environment workers died while they ran it")
    verdict = flight.verdict
    assert verdict is not None and verdict.environment == "a" and verdict.may_pass is worked
    assert f"{enough} tasks in a row killed the workers that ran them" in str(verdict)


def test_occasional_killers_do_not_end_the_run() -> None:
    flight = Flight()
    for task in range(5 * MANY_KILLERS):
        flight.failures.given_up("a", flight.now, killer="x")
        flight.failures.finished(flight.start(task), "a", flight.now)
    assert flight.verdict is None
