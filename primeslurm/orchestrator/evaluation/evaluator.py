"""Evaluates the policy while it is trained: starts evaluations that are due, stores samples, and reports results.

At most one evaluation runs at a time. It starts as soon as the engines have the policy of its step, or a later one if
they skipped it. Training and weight updates do not wait for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.evaluation.evaluation_run import EvaluationRun
from primeslurm.orchestrator.evaluation.results import Archive, EvaluationHeader, Sample, summarise
from primeslurm.orchestrator.rollouts.cache_salt import attempt_prefix
from primeslurm.orchestrator.rollouts.job_protocol import Job, JobFailure
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment
from primeslurm.recipe.sections.sandboxes import Limits
from primeslurm.records.evaluation import BestCheckpoint, EvaluationProgress, EvaluationRecord, best_of
from primeslurm.records.events.evaluation import (
    EvaluationDone,
    EvaluationSampleFailed,
    EvaluationSkipped,
    EvaluationStarted,
)
from primeslurm.records.events.training import TaskGivenUp
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import MetricsLog
from primeslurm.wire.batches.rollout import Rollout

log = logging.getLogger(__name__)

# Seconds after which results are written again if that failed.
RETRY_S = 5.0


class Schedule:
    """The steps that are due, and those that are settled: evaluated or skipped."""

    def __init__(self, recipe: Recipe, settled: Iterable[int] = ()) -> None:
        self._evaluation = recipe.evaluation
        self._last = recipe.max_steps
        self._is_eval_task = recipe.task == "eval"
        self.settled = set(settled)

    def all_due(self, version: int) -> list[int]:
        """Return all steps up to a policy version that the recipe evaluates, ascending."""
        if self._evaluation is None or version < 0:
            return []
        if self._is_eval_task:
            return [0]
        first = [0] if self._evaluation.at_start else []
        steps = [*first, *range(self._evaluation.interval, self._last, self._evaluation.interval), self._last]
        return [step for step in steps if step <= version]

    def owing(self, version: int) -> list[int]:
        """Return the steps that are due at a policy version and not settled, ascending."""
        # The engines have no policy of a step before a settled one, and the initial model only at version 0.
        newest = max(self.settled, default=-1)
        return [step for step in self.all_due(version) if step > newest and (step or not version)]


class Evaluator:
    """See the module docstring.

    Args:
        recipe: the run's recipe. Without `evaluation`, the evaluator does nothing.
        newest: policy version from which the run resumes. Later evaluations are set aside.
    """

    def __init__(
        self,
        recipe: Recipe,
        arguments: OrchestratorArguments,
        newest: int,
        incarnation: str,
        journal: Journal,
        metrics: MetricsLog,
        recorder: RolloutRecorder,
    ) -> None:
        self._recipe = recipe
        self.routers = list(arguments.routers)
        self._salt_prefix = attempt_prefix(arguments.run_id, arguments.attempt)
        self._incarnation = incarnation
        self._journal, self._metrics, self._recorder = journal, metrics, recorder
        self._archive = Archive(arguments.run_dir)
        if undone := self._archive.set_aside(newest, arguments.attempt):
            log.warning("set aside evaluations of steps that will be trained again: %s", undone)
        self._records = self._archive.records()
        self._schedule = Schedule(recipe, (record.step for record in self._records))
        self._run: EvaluationRun | None = None
        self._header: EvaluationHeader | None = None
        self._finish_after = 0.0
        for record in self._records:
            self._report(record)  # again, because its metrics may have been lost in a crash
        if recipe.evaluation is not None and (unfinished := self._archive.unfinished()):
            header, samples = unfinished
            # Samples of a policy that will be trained again must not count.
            self._start(header, [sample for sample in samples if sample.newest_version <= newest])

    def follow(self, version: int, tasks: Mapping[str, int]) -> list[str]:
        """Start the evaluation that is due at a version (-1: none), or conclude it. Return the jobs to cancel."""
        cancelled: list[str] = []
        if self._run is None:
            self._start_due(version)
        if self._run is not None and version < 0:
            self._run.wait()
        elif self._run is not None:
            # Workers report the number of tasks once they have loaded the environment.
            self._run.limit(tasks)
            failed, cancelled = self._run.expire()
            for sample in failed:
                self._add(sample)
            if self._run.complete:
                self._conclude()
        return cancelled

    def next_job(self, available: Collection[str], version: int) -> Job | None:
        return self._run.next_job(available, version) if self._run and version >= 0 else None

    def adopt_job(self, job: Job) -> bool:
        return self._run is not None and self._run.adopt_job(job)

    def runs(self, job: str) -> bool:
        return self._run is not None and self._run.runs(job)

    def result(self, job: str, outcome: tuple[Rollout, ...] | JobFailure) -> None:
        """Take the rollout or the failure of a job in flight."""
        assert self._run is not None
        if isinstance(outcome, JobFailure):
            log.warning("job %s failed: %s", job, outcome.error)
            self._journal.write(EvaluationSampleFailed(job, outcome.error[:1000]))
            self._add(self._run.failed(job, outcome.error, outcome.cause))
        else:
            self._add(self._run.finished(job, outcome), outcome)

    def lost(self, job: str) -> None:
        assert self._run is not None
        self._run.lost(job)

    def give_up_task(self, job: Job, reason: str) -> list[str]:
        """Fail the samples of a task that kills its workers. Return the jobs to cancel."""
        if self._run is None or job.environment not in self._run.labels:
            return []
        samples, jobs = self._run.give_up(job.environment, job.example, reason)
        for sample in samples:
            self._add(sample)
        self._journal.write(TaskGivenUp(job.environment, job.example, reason, job.task))
        return jobs

    def unusable(self, label: str, worker: int, error: str) -> None:
        """Record that a worker cannot serve an environment. If no other can, the samples fail by timeout."""
        self._journal.write(EvaluationSampleFailed(f"environment-{label}-{worker}", error[:1000]))

    def drop_router(self, router: str) -> list[str]:
        if router in self.routers:
            self.routers.remove(router)
        return self._run.drop_router(router) if self._run else []

    def settled(self, version: int) -> bool:
        return self._run is None and not self._schedule.owing(version)

    def give_up(self, version: int, why: str) -> None:
        """Skip evaluations that are due at a policy version and have not started."""
        for step in self._schedule.owing(version):
            self._skip(step, why)

    def kept_steps(self, committed: int) -> list[int]:
        """Return the steps up to `committed` whose checkpoints must stay: the best, and those not evaluated yet."""
        if self._recipe.evaluation is None or self._recipe.evaluation.keep_best is None:
            return []
        # The evaluation in progress may find a new best step.
        running = [self._run.step] if self._run else []
        best = [self.best.step] if self.best else []
        return sorted({*best, *running, *self._schedule.owing(committed)})

    @property
    def running(self) -> bool:
        return self._run is not None

    @property
    def working(self) -> set[str]:
        """Labels of the environments in which a sample of the running evaluation has succeeded."""
        samples = self._run.samples.values() if self._run else ()
        return {sample.label for sample in samples if sample.error is None}

    @property
    def load(self) -> Mapping[str, int]:
        return self._run.load if self._run else {}

    @property
    def best(self) -> BestCheckpoint | None:
        """The best step so far, by the metric in the recipe."""
        evaluation = self._recipe.evaluation
        return best_of(self._records, evaluation.keep_best) if evaluation and evaluation.keep_best else None

    @property
    def progress(self) -> EvaluationProgress | None:
        """Progress for the run's status; None if the recipe has no evaluation."""
        if self._recipe.evaluation is None:
            return None
        last = self._records[-1] if self._records else None
        if self._run is None:
            return EvaluationProgress(last=last, best=self.best)
        run = self._run
        return EvaluationProgress(run.step, len(run.samples), run.total, run.inflight, last, self.best)

    def _start_due(self, version: int) -> None:
        owing = self._schedule.owing(version)
        if not owing:
            return
        *skipped, step = owing
        # Write the header before the first job, so that a restarted orchestrator knows about the evaluation.
        try:
            header = EvaluationHeader(step, version, time.time())
            self._archive.begin(header)
        except OSError as error:
            log.warning("evaluation of step %d: cannot start, because its file cannot be written: %s", step, error)
            return
        for earlier in skipped:
            self._skip(earlier, f"another evaluation took until step {step} was due")
        self._start(header, [])

    def _start(self, header: EvaluationHeader, samples: Collection[Sample]) -> None:
        assert self._recipe.evaluation is not None
        self._header = header
        environments = self._recipe.evaluation.environments
        timeout_s = self._recipe.orchestrator.stall_s
        self._run = EvaluationRun(
            header.step,
            header.version,
            environments,
            max_inflight=self._recipe.max_evaluation_inflight,
            routers=self.routers,
            salt_prefix=self._salt_prefix,
            incarnation=self._incarnation,
            start_timeout_s=timeout_s,
            rollout_timeout_s=max(timeout_s, *map(_longest_rollout_s, environments)),
            ended=samples,
        )
        self._journal.write(EvaluationStarted(header.step, header.version, len(samples)))

    def _add(self, sample: Sample | None, rollout: tuple[Rollout, ...] = ()) -> None:
        """Keep a sample that has ended, with its rollout unless it failed."""
        if sample is None or self._run is None:
            return
        step = self._run.step
        self._archive.add(step, sample)
        facts = {"environment": sample.label, "example": sample.example, "task": sample.example}
        if not rollout:
            group = f"evaluation-{step}/{sample.label}-{sample.example}"
            facts |= {"id": f"{group}.{sample.sample}", "group": group}
        self._recorder.evaluated(step, rollout, error=sample.error or "", **facts)

    def _conclude(self) -> None:
        assert self._run is not None and self._header is not None
        if time.monotonic() < self._finish_after:  # the disk was full a moment ago
            return
        self._recorder.flush_evaluation(self._run.step)
        samples = list(self._run.samples.values())
        record = self._record(samples, self._header)
        try:
            self._archive.finish(record, samples)
        except OSError as error:
            log.warning("evaluation of step %d: cannot write the results, will try again: %s", record.step, error)
            self._finish_after = time.monotonic() + RETRY_S
            return
        # The results are on disk. From here on, a restart does not repeat the evaluation.
        self._run = self._header = None
        self._records.append(record)
        self._schedule.settled.add(record.step)
        failed = sum(sample.error is not None for sample in samples)
        rewards = {result.label: result.reward.value for result in record.results}
        self._journal.write(EvaluationDone(record.step, round(record.seconds, 3), rewards, failed))
        self._report(record)

    def _record(self, samples: Collection[Sample], header: EvaluationHeader) -> EvaluationRecord:
        assert self._recipe.evaluation is not None
        # Samples without a token, such as failed ones, have no policy version.
        sampled = [sample for sample in samples if sample.oldest_version >= 0]
        results = []
        for environment in self._recipe.evaluation.environments:
            if of_label := [sample for sample in samples if sample.label == environment.label]:
                results.append(summarise(environment.label, of_label, environment.passes, environment.solved_reward))
        now = time.time()
        return EvaluationRecord(
            step=header.step,
            version=header.version,
            oldest_version=min((sample.oldest_version for sample in sampled), default=header.version),
            newest_version=max((sample.newest_version for sample in sampled), default=header.version),
            time=now,
            seconds=max(0.0, now - header.time),
            results=results,
        )

    def _report(self, record: EvaluationRecord) -> None:
        try:
            self._metrics.add_evaluation(record.step, record.row())
        except OSError as error:
            log.warning("evaluation of step %d: cannot write its metrics yet: %s", record.step, error)

    def _skip(self, step: int, why: str) -> None:
        self._schedule.settled.add(step)
        self._journal.write(EvaluationSkipped(step, why))


def _longest_rollout_s(environment: EvaluationEnvironment) -> float:
    # A rollout without programs has no limits in the recipe, and gets the time of the default limits.
    return (environment.runtime.limits if environment.runtime else Limits()).longest_s
