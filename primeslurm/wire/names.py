"""Names that a plan writes down and processes look up; nothing else, so that planning imports no more than these."""

from __future__ import annotations

LOCAL_CHECKPOINTS = "PRIMESLURM_LOCAL_CHECKPOINTS"
"""The variable that names a rank's directory for copies on its node, which the agent makes and removes."""
ENGINE_HEADER = "X-Primeslurm-Engine"
"""Header by which an engine's gate says in each answer where the engine listens (`host:port`). Routers pass it on."""
STATUS_PATH = "/primeslurm/status"
"""Where an engine's gate answers with its EngineStatus as soon as its HTTP server is up: `/health` waits for the
current policy. Only engines that are trained for have it."""
