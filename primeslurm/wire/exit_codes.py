"""Exit codes of a run's processes that tell their parent why they ended. `errors.ExitCode` has those of commands."""

from __future__ import annotations

FAILED = 1
USAGE_ERROR = 2  # an unknown option or a wrong value, as argparse reports it
CHECKPOINTED = 75  # a trainer has written a checkpoint and stopped, as requested
STALLED = 76  # the orchestrator saw no progress for too long; its journal names the suspect
UNRECOVERABLE = 77  # orchestrator or trainer: the run cannot work, and another attempt would end in the same way
NOT_ON_THIS_NODE = 126  # the process to attach a shell to does not run on this node
COMMAND_NOT_FOUND = 127  # the command cannot be executed, as a shell reports it
