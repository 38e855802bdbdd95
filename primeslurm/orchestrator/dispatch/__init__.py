"""What runs next: groups and their rollouts, which examples they are of, and which groups make a batch."""

from primeslurm.orchestrator.dispatch.dispatcher import MAX_TRIES, Dispatcher
from primeslurm.orchestrator.dispatch.examples import Examples
from primeslurm.orchestrator.dispatch.limits import DispatchLimits
from primeslurm.orchestrator.dispatch.open_groups import group_id

__all__ = ["MAX_TRIES", "DispatchLimits", "Dispatcher", "Examples", "group_id"]
