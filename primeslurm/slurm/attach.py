"""The command that runs something on one node of a running job, beside what runs there."""

from __future__ import annotations

from collections.abc import Sequence

from primeslurm.base.errors import RunError
from primeslurm.slurm.client import JobState


def step_command(
    job: JobState, group: int, host: str, argv: Sequence[str], *, more: Sequence[str] = (), terminal: bool
) -> list[str]:
    """`srun` of a step that shares everything with the steps that run on `host`.

    Args:
        job: as Slurm knows it.
        group: of the plan; in a heterogeneous job, the component that the host belongs to.
        host: name of the node.
        argv: the command.
        more: options of the plan's own srun, which may name a container.
        terminal: give the step a terminal, for a shell.

    Raises:
        RunError: the job does not run there.
    """
    het = len(job.components) > 1
    component = next((c for c in job.components if c.offset == (group if het else 0)), None)
    if component is None or component.state != "RUNNING":
        raise RunError(f"job {job.job_id} does not run: {component.state if component else job.state}")
    # srun wants the leader's id with the component's number: it refuses the component's own id.
    options = [f"--jobid={job.job_id}", *([f"--het-group={group}"] if het else [])]
    options += ["--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1", *more]
    return ["srun", *options, *(["--pty"] if terminal else []), *argv]
