"""How agents supervise a process: restart limits, health checks, heartbeats and their timeouts.

`node.agent.supervision` and `node.head.restart_groups` carry this out.
"""

from __future__ import annotations

from typing import Literal

from primeslurm.recipe.fields.section import Section

Restart = Literal["in_place", "unit", "attempt"]

# Restarts before a process or restart group is given up. A process that ran for five minutes gets a new budget
# (`node.agent.supervision`).
MAX_RESTARTS = 5


class Health(Section):
    """Readiness check of a process: HTTP 200 on `path` of port `port`."""

    port: str
    path: str = "/health"
    start_timeout_s: int = 1800  # longest time from the start to the first 200 [s]
    hang_timeout_s: int = 60  # a ready process that gives no HTTP answer for this long [s] is restarted


class HeartbeatLimits(Section):
    """Timeouts of the heartbeats that a process's main loop sends (`records.heartbeats`)."""

    start_timeout_s: int = 1800  # longest time from the start to the first heartbeat [s]
    hang_timeout_s: int = 300
    """Longest time between two heartbeats [s], unless the process has announced a longer phase."""
