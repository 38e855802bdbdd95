"""Exit codes with a meaning between a process and its agent."""

from __future__ import annotations

CHECKPOINTED = 75
"""A trainer that was asked to checkpoint and stop did so."""
STALLED = 76
"""The orchestrator saw no progress for too long; its journal names the suspect. Restarting it would not help."""
