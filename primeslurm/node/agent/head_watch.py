"""Whether the head's agent was killed: srun says so in the job's output, long before its silence does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from primeslurm.plan.model import Plan
from primeslurm.run.directory import RunDirectory
from primeslurm.slurm.launch_failures import START, JobOutput, kills, node_names

QUIET = 3.0
"""A head that was heard of so many heartbeats ago is there: nobody reads the output of a job that is well."""
PERIOD_S = 1.0


class HeadKillDetector:
    """Looks into the job's output while the head is silent. Without a job of Slurm it sees nothing.

    Args:
        plan: of the run.
        environ: of a task of the job.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        names = node_names(plan, environ)
        self._head = names[0] if names else None
        path = RunDirectory(Path(plan.run_dir)).job_output(environ.get("SLURM_JOB_ID", ""))
        self._output = JobOutput(path, environ.get(START, ""))
        self._quiet_s = QUIET * plan.heartbeat_s
        self._looked_at = -math.inf

    def killed(self, silent_s: float, now: float) -> str | None:
        """Tell how the head's agent was killed; None if nothing says that it was.

        Args:
            silent_s: for so long the head was not heard of.
            now: a monotonic clock, in seconds.
        """
        if self._head is None or silent_s < self._quiet_s or now - self._looked_at < PERIOD_S:
            return None
        self._looked_at = now
        try:
            return kills(self._output.news()).get(self._head)
        except OSError:
            return None
