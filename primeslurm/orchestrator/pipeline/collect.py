"""Stage 2, collect: takes the reports of environment workers, and returns a group when its last rollout arrives."""

from __future__ import annotations

import logging

from primeslurm.orchestrator.pipeline.context import PipelineContext
from primeslurm.orchestrator.rollouts import worker_deaths, worker_pool
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job, JobFailure
from primeslurm.orchestrator.telemetry.rollout_failures import headline

log = logging.getLogger(__name__)


class CollectStage(worker_pool.JobKeeper):
    """Input: events of the worker pool. Output: complete groups. Also decides about jobs of an earlier orchestrator."""

    def __init__(self, context: PipelineContext) -> None:
        self._dispatcher, self._evaluator = context.dispatcher, context.evaluator
        self._policy, self._deaths = context.policy, context.deaths
        self._monitor, self._feedback = context.monitor, context.feedback
        self._recorder = context.recorder
        self._run_dir = context.arguments.run_dir

    def handle(self, event: worker_pool.WorkerEvent) -> RolloutGroup | None:
        """Take one event. Returns the group that it completed."""
        match event:
            case worker_pool.RolloutEnded(job, JobFailure() as failure):
                self._failed(job, failure)
            case worker_pool.RolloutEnded():
                return self._finished(event)
            case worker_pool.JobLost(job):
                if self._dispatcher.runs(job):
                    self._dispatcher.lost(job)
                elif self._evaluator.runs(job):
                    self._evaluator.lost(job)
            case worker_pool.WorkerUnusable(environment, worker, error):
                log.warning("worker %d cannot serve %s: %s", worker, environment, error)
                if self._is_training(environment):
                    self._monitor.worker_failed(environment, worker, error)
                else:
                    self._evaluator.unusable(environment, worker, error)
            case worker_pool.WorkerDied():
                self._worker_died(event)
            case worker_pool.EnginesAnswered(answers):
                self._policy.take_answers(answers)
        return None

    def adopt_job(self, job: Job, *, runs: bool) -> bool:
        """Continue a job of an earlier orchestrator. False if it is not needed. See `Dispatcher.adopt_job`."""
        if self._evaluator.adopt_job(job):
            return True
        if not self._dispatcher.adopt_job(job, runs=runs):
            return False
        self._monitor.rollout_started(job)
        return True

    def holds_result(self, job: str) -> bool:
        return self._dispatcher.holds_result(job)

    def _finished(self, event: worker_pool.RolloutEnded) -> RolloutGroup | None:
        job, rollout = event
        assert not isinstance(rollout, JobFailure)
        if self._evaluator.runs(job):
            self._evaluator.result(job, rollout)
            self._feedback.wake()
        if not self._dispatcher.runs(job):
            return None
        self._feedback.wake()
        self._monitor.rollout_finished(rollout)
        group = self._dispatcher.finished(job, rollout)
        self._feedback.cancel(self._dispatcher.take_surplus_jobs())
        return group

    def _failed(self, job: str, failure: JobFailure) -> None:
        if self._evaluator.runs(job):
            self._evaluator.result(job, failure)
            self._feedback.wake()
        if not self._dispatcher.runs(job):
            return
        self._feedback.wake()
        log.warning("job %s failed: %s", job, failure.error)
        group = self._dispatcher.group_of(job)
        self._monitor.rollout_failed(job, failure)
        facts = {"environment": group.environment, "example": group.example, "task": group.task}
        self._recorder.failed(job, failure.error, group=group.id, **facts)
        self._feedback.cancel(self._dispatcher.failed(job, failure.cause))
        if group.id not in self._dispatcher.open:
            reason = headline(failure.error)
            self._monitor.task_given_up(group.environment, group.example, reason, group.task, kills=False)

    def _worker_died(self, event: worker_pool.WorkerDied) -> None:
        """Give up the tasks that are now known to kill workers."""
        worker_deaths.save_deaths(self._run_dir, self._deaths)
        for job in event.guilty:
            reason = self._deaths.reason(job)
            log.warning("task %d of %s is given up: %s", job.example, job.environment, reason)
            if self._is_training(event.environment):
                self._monitor.task_given_up(event.environment, job.example, reason, job.task, kills=True)
                self._feedback.cancel(self._dispatcher.give_up(event.environment, job.example))
            else:
                self._feedback.cancel(self._evaluator.give_up_task(job, reason))
        self._feedback.wake()

    def _is_training(self, environment: str) -> bool:
        return environment in self._dispatcher.limits.ratios
