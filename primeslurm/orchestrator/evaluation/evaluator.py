"""Evaluates the policy while it is trained: starts what is due, keeps what ended, and tells what came out.

At most one evaluation runs at a time. It begins as soon as the engines have the policy of its step (or a later one, if
they skipped that), and neither training nor policy updates wait for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.evaluation.archive import Archive, EvaluationHeader
from primeslurm.orchestrator.evaluation.evaluation_run import EvaluationRun
from primeslurm.orchestrator.evaluation.schedule import Schedule
from primeslurm.orchestrator.evaluation.statistics import Sample, summarise
from primeslurm.orchestrator.rollouts.job_protocol import Job, JobFailure
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
from primeslurm.wire.batches.rollouts import Rollout

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Time after which results are written again that could not be written."""


class Evaluator:
    """See the module docstring.

    Args:
        recipe: of the run; without `evaluation` nothing happens.
        arguments: of the orchestrator.
        newest: policy version that the run goes on from; what was evaluated beyond it was undone.
        incarnation: makes job ids unique over restarts of the orchestrator.
    """

    def __init__(
        self,
        recipe: Recipe,
        arguments: OrchestratorArguments,
        newest: int,
        incarnation: str,
        journal: Journal,
        metrics: MetricsLog,
    ) -> None:
        self._recipe = recipe
        self._routers = list(arguments.routers)
        self._salt, self._incarnation = f"{arguments.run_id}.{arguments.attempt}", incarnation
        self._journal, self._metrics = journal, metrics
        self._archive = Archive(arguments.run_dir)
        if undone := self._archive.set_aside(newest, arguments.attempt):
            log.warning("evaluations of steps that were undone are set aside: %s", undone)
        self._records = self._archive.records()
        self._schedule = Schedule(recipe, (record.step for record in self._records))
        self._run: EvaluationRun | None = None
        self._begun: EvaluationHeader | None = None
        self._finish_after = 0.0
        for record in self._records:
            self._report(record)
        if recipe.evaluation is not None and (unfinished := self._archive.unfinished()):
            begun, samples = unfinished
            # What was sampled by a policy that was undone counts no more than what training made of it.
            self._start(begun, [sample for sample in samples if sample.newest_version <= newest])

    def follow(self, version: int, tasks: Mapping[str, int]) -> list[str]:
        """Begin and conclude what is due.

        Args:
            version: policy version that all engines have; -1 for none.
            tasks: how many tasks environments have, by label.

        Returns:
            Jobs to cancel.
        """
        cancelled: list[str] = []
        if self._run is None:
            self._begin_due(version)
        if self._run is not None and version < 0:
            self._run.wait()
        elif self._run is not None:
            self._run.limit(tasks)
            failed, cancelled = self._run.expire()
            for sample in failed:
                self._ended(sample)
            if self._run.complete:
                self._conclude()
        return cancelled

    def next_job(self, available: Collection[str], version: int) -> Job | None:
        """Dispatch the next rollout; None if nothing may start now. As `EvaluationRun.next_job`."""
        return self._run.next_job(available, version) if self._run and version >= 0 else None

    def adopt_job(self, job: Job) -> bool:
        """Go on with a job that another orchestrator has dispatched; False if it is of no evaluation that runs."""
        return self._run is not None and self._run.adopt_job(job)

    def runs(self, job: str) -> bool:
        """Tell whether a job is one of evaluation, and in flight."""
        return self._run is not None and self._run.runs(job)

    def result(self, job: str, outcome: tuple[Rollout, ...] | JobFailure) -> None:
        """Take what a job in flight made, or why it failed."""
        assert self._run is not None
        if isinstance(outcome, JobFailure):
            log.warning("job %s failed: %s", job, outcome.error)
            self._journal.write(EvaluationSampleFailed(job, outcome.error[:1000]))
            self._ended(self._run.failed(job, outcome.error, outcome.cause))
        else:
            self._ended(self._run.finished(job, outcome))

    def lost(self, job: str) -> None:
        """Have a job in flight run again: its worker is gone."""
        assert self._run is not None
        self._run.lost(job)

    def give_up_task(self, job: Job, reason: str) -> list[str]:
        """Fail the samples of a task that kills its workers; returns the jobs to cancel."""
        if self._run is None or job.environment not in self._run.labels:
            return []
        samples, jobs = self._run.give_up(job.environment, job.example, reason)
        for sample in samples:
            self._ended(sample)
        self._journal.write(TaskGivenUp(job.environment, job.example, reason, job.task))
        return jobs

    def unusable(self, label: str, worker: int, error: str) -> None:
        """Note that a worker cannot serve an environment. Without any other one its samples fail once time is up."""
        self._journal.write(EvaluationSampleFailed(f"environment-{label}-{worker}", error[:1000]))

    def drop_router(self, router: str) -> list[str]:
        """Do without a replica that is gone; returns the jobs to cancel."""
        if router in self._routers:
            self._routers.remove(router)
        return self._run.drop_router(router) if self._run else []

    def settled(self, version: int) -> bool:
        """Tell whether all that is due at a policy version is done."""
        return self._run is None and not self._schedule.owing(version)

    def give_up(self, version: int, why: str) -> None:
        """Skip what is due up to a version and has not begun."""
        for step in self._schedule.owing(version):
            self._skip(step, why)

    def kept_steps(self, committed: int) -> list[int]:
        """List the steps up to `committed` whose checkpoints are needed: the best, and those still to be evaluated."""
        if self._recipe.evaluation is None or self._recipe.evaluation.keep_best is None:
            return []
        running = [self._run.step] if self._run else []
        best = [self.best.step] if self.best else []
        return sorted({*best, *running, *self._schedule.owing(committed)})

    @property
    def routers(self) -> tuple[str, ...]:
        """Return the routers that rollouts are spread over."""
        return tuple(self._routers)

    @property
    def running(self) -> bool:
        """Tell whether an evaluation runs."""
        return self._run is not None

    @property
    def working(self) -> set[str]:
        """Return the labels of the environments of which a sample of the evaluation that runs has got through."""
        samples = self._run.samples.values() if self._run else ()
        return {sample.label for sample in samples if sample.error is None}

    @property
    def load(self) -> Mapping[str, int]:
        """Return how many rollouts run on each replica, by router."""
        return self._run.load if self._run else {}

    @property
    def best(self) -> BestCheckpoint | None:
        """Return the best step so far, by the metric that the recipe names."""
        evaluation = self._recipe.evaluation
        return best_of(self._records, evaluation.keep_best) if evaluation and evaluation.keep_best else None

    @property
    def progress(self) -> EvaluationProgress | None:
        """Say how far evaluation is; None if the run has none."""
        if self._recipe.evaluation is None:
            return None
        last = self._records[-1] if self._records else None
        if self._run is None:
            return EvaluationProgress(last=last, best=self.best)
        run = self._run
        return EvaluationProgress(run.step, len(run.samples), run.total, run.inflight, last, self.best)

    def _begin_due(self, version: int) -> None:
        owing = self._schedule.owing(version)
        if not owing:
            return
        *skipped, step = owing
        try:
            begun = EvaluationHeader(step, version, time.time())
            self._archive.begin(begun)
        except OSError as error:
            log.warning("the evaluation of step %d is held back, it cannot be recorded: %s", step, error)
            return
        for earlier in skipped:
            self._skip(earlier, f"another evaluation took until step {step} was due")
        self._start(begun, [])

    def _start(self, begun: EvaluationHeader, samples: Collection[Sample]) -> None:
        assert self._recipe.evaluation is not None
        self._begun = begun
        patience_s = self._recipe.orchestrator.stall_timeout_s
        self._run = EvaluationRun(
            begun.step,
            begun.version,
            self._recipe.evaluation.environments,
            max_inflight=self._recipe.max_evaluation_inflight,
            routers=self._routers,
            salt=self._salt,
            incarnation=self._incarnation,
            patience_s=patience_s,
            longest_s=max(patience_s, *(_longest_s(each) for each in self._recipe.evaluation.environments)),
            ended=samples,
        )
        self._journal.write(EvaluationStarted(begun.step, begun.version, len(samples)))

    def _ended(self, sample: Sample | None) -> None:
        if sample is not None and self._run is not None:
            self._archive.keep(self._run.step, sample)

    def _conclude(self) -> None:
        """Put the results on disk, and only then tell them. A full disk holds them back."""
        assert self._run is not None and self._begun is not None
        if time.monotonic() < self._finish_after:
            return
        samples = list(self._run.samples.values())
        record = self._record(samples, self._begun)
        try:
            self._archive.finish(record, samples)
        except OSError as error:
            log.warning("the results of step %d are held back, they cannot be written: %s", record.step, error)
            self._finish_after = time.monotonic() + RETRY_S
            return
        self._run = self._begun = None
        self._records.append(record)
        self._schedule.settled.add(record.step)
        failed = sum(sample.error is not None for sample in samples)
        rewards = {result.label: result.reward.value for result in record.results}
        self._journal.write(EvaluationDone(record.step, round(record.seconds, 3), rewards, failed))
        self._report(record)

    def _record(self, samples: Collection[Sample], begun: EvaluationHeader) -> EvaluationRecord:
        assert self._recipe.evaluation is not None
        sampled = [sample for sample in samples if sample.oldest_version >= 0]
        results = []
        for environment in self._recipe.evaluation.environments:
            if found := [sample for sample in samples if sample.label == environment.label]:
                results.append(summarise(environment.label, found, environment.passes, environment.solved_reward))
        now = time.time()
        return EvaluationRecord(
            step=begun.step,
            version=begun.version,
            oldest_version=min((sample.oldest_version for sample in sampled), default=begun.version),
            newest_version=max((sample.newest_version for sample in sampled), default=begun.version),
            time=now,
            seconds=max(0.0, now - begun.time),
            results=results,
        )

    def _report(self, record: EvaluationRecord) -> None:
        try:
            self._metrics.add_evaluation(record.step, record.row())
        except OSError as error:
            log.warning("metrics of the evaluation of step %d are not in the file yet: %s", record.step, error)

    def _skip(self, step: int, why: str) -> None:
        self._schedule.settled.add(step)
        self._journal.write(EvaluationSkipped(step, why))


def _longest_s(environment: EvaluationEnvironment) -> float:
    """Longest time of a rollout [s]; one without programs gets as long as with the default limits."""
    return (environment.runtime.limits if environment.runtime else Limits()).longest_s
