"""Exit codes with a meaning for the agent that started a process. Those of commands are `errors.ExitCode`."""

from __future__ import annotations

FAILED = 1
USAGE_ERROR = 2  # unknown option, or invalid value of an option, as argparse uses it
CHECKPOINTED = 75  # the trainer was asked to save a checkpoint and stop, and did so
STALLED = 76  # The orchestrator saw no progress for too long. Its journal names the suspect. A restart would not help.
UNRECOVERABLE = 77  # the run cannot work, and another attempt would fail in the same way
NOT_ON_THIS_NODE = 126  # the process that a shell was to be attached to does not run on this node
COMMAND_NOT_FOUND = 127  # the command cannot be executed, as a shell uses it
