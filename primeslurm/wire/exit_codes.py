"""Exit codes of processes with a meaning to who started them; those of commands are `errors.ExitCode`."""

from __future__ import annotations

FAILED = 1
USAGE_ERROR = 2
"""A program does not know an option, or not the value that it was given, as argparse says it."""
CHECKPOINTED = 75
"""A trainer that was asked to checkpoint and stop did so."""
STALLED = 76
"""The orchestrator saw no progress for too long; its journal names the suspect. Restarting it would not help."""
UNRECOVERABLE = 77
"""The orchestrator or the trainer has seen that the run cannot work: another attempt would end in the same way."""
NOT_ON_THIS_NODE = 126
"""What a shell was to be attached to does not run on this node."""
COMMAND_NOT_FOUND = 127
"""The command cannot be executed, as a shell says it."""
