"""What runs next: groups and their rollouts, which examples they are of, and which groups make a batch."""

from primeslurm.orchestrator.dispatch.dispatcher import MAX_FAILURES, Dispatcher
from primeslurm.orchestrator.dispatch.examples import Examples
from primeslurm.orchestrator.dispatch.group_queues import group_id
from primeslurm.orchestrator.dispatch.limits import DispatchLimits

__all__ = ["MAX_FAILURES", "DispatchLimits", "Dispatcher", "Examples", "group_id"]
