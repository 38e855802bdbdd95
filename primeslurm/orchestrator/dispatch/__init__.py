"""What runs next: groups and their rollouts, which examples they are of, and which groups make a batch."""

from primeslurm.orchestrator.dispatch.dispatcher import MOST_FAILURES, Dispatcher
from primeslurm.orchestrator.dispatch.examples import Examples
from primeslurm.orchestrator.dispatch.limits import DispatchLimits
from primeslurm.orchestrator.dispatch.open_groups import group_id

__all__ = ["MOST_FAILURES", "DispatchLimits", "Dispatcher", "Examples", "group_id"]
