"""Decides which rollout runs next: open groups, their examples, replicas, policy versions, and the age limit."""

from primeslurm.orchestrator.dispatch.dispatcher import MAX_FAILURES, Dispatcher
from primeslurm.orchestrator.dispatch.examples import Examples
from primeslurm.orchestrator.dispatch.group_queues import group_id
from primeslurm.orchestrator.dispatch.limits import DispatchLimits

__all__ = ["MAX_FAILURES", "DispatchLimits", "Dispatcher", "Examples", "group_id"]
