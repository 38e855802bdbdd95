"""`primeslurm attach`: open a shell next to a process of a run."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from primeslurm.api.runs.attach import attachment
from primeslurm.api.runs.run import find_run
from primeslurm.base.errors import RunError
from primeslurm.cli.options import RunArg, RunsOpt
from primeslurm.cli.output import note


def attach(
    run: RunArg,
    target: Annotated[
        str,
        typer.Argument(help="Role, process or node, for example decode-r0-3.", metavar="TARGET", show_default=False),
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Command to run instead of a shell, after --.", metavar="COMMAND", show_default=False),
    ] = None,
    runs: RunsOpt = None,
) -> None:
    """Open a shell next to a process of a run.

    The shell runs on the node of the process, in the job's allocation, with the environment and the directory of the
    process. The exit code is that of the shell or command.

    Examples:
        primeslurm attach my-run decode-r0-3
        primeslurm attach my-run trainer-rank-0 -- nvidia-smi
    """
    argv = command or [os.environ.get("SHELL", "/bin/bash")]
    shell = attachment(find_run(run, runs), target, argv, terminal=sys.stdin.isatty() and sys.stdout.isatty())
    note(f"{shell.process or 'agent'} on {shell.host}")
    # The shell replaces this process, so it gets all signals, and its exit code is that of the command.
    sys.stdout.flush()
    try:
        os.execvpe(shell.argv[0], shell.argv, shell.environment)
    except OSError as error:
        raise RunError(f"{shell.argv[0]}: {error.strerror}") from None
