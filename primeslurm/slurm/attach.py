"""Build the command that runs a program on a node of a running job."""

from __future__ import annotations

from collections.abc import Sequence

from primeslurm.base.errors import RunError
from primeslurm.slurm.client import JobState


def step_command(
    job: JobState, group: int, host: str, argv: Sequence[str], *, more: Sequence[str] = (), terminal: bool
) -> list[str]:
    """Return an `srun` command for a step that shares all resources with the other steps on `host`.

    Args:
        group: index of the plan's group that the host belongs to.
        more: additional srun options of the plan, for example a container's.
        terminal: whether the step gets a terminal, as a shell needs.

    Raises:
        RunError: the job does not run on this host.
    """
    het = len(job.components) > 1
    component = next((c for c in job.components if c.offset == (group if het else 0)), None)
    if component is None or component.state != "RUNNING":
        raise RunError(f"job {job.job_id} does not run: {component.state if component else job.state}")
    # srun wants the leader's id with the component's number: it refuses the component's own id.
    options = [f"--jobid={job.job_id}", *([f"--het-group={group}"] if het else [])]
    options += ["--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1", *more]
    return ["srun", *options, *(["--pty"] if terminal else []), *argv]
