"""The command line: one file per family of verbs, which parses, prints and ends with an exit code (`errors.ExitCode`).

What the verbs do is `primeslurm.api`'s.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

import typer

from primeslurm import __version__
from primeslurm.cli.lazy_verbs import VerbGroup, asks_for_json
from primeslurm.errors import PrimeslurmError

GARBAGE_AFTER = 300_000
"""New objects after which Python looks for garbage among them. A recipe and its plan are as many, and all stay: looking
every 700, as it does by default, took a twelfth of `render`."""

app = typer.Typer(
    name="primeslurm",
    cls=VerbGroup,
    help="Asynchronous RL post-training of large MoE models on Slurm: one recipe, one command.",
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _version(value: bool) -> None:
    if value:
        from primeslurm.run.versions import commit

        checkout = commit()
        typer.echo(f"primeslurm {__version__}" + (f" ({checkout})" if checkout else ""))
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def prepare_streams() -> None:
    """Make stdout and stderr take every text.

    One that was closed (`>&-`, some daemons) discards it. Where the encoding of stdout lacks a character (of LC_ALL=C,
    for example), a question mark is printed; stderr escapes it by itself.
    """
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - open for as long as the process lives
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Entry point of the `primeslurm` command: an error of ours becomes one message and its exit code."""
    gc.set_threshold(GARBAGE_AFTER)
    prepare_streams()
    try:
        app()
    except PrimeslurmError as error:
        _fail(error)
    except OSError as error:  # a full disk, a directory that may not be written
        _fail(PrimeslurmError(f"{error.filename}: {error.strerror}" if error.filename else str(error)))


def _fail(error: PrimeslurmError) -> NoReturn:
    from primeslurm.cli.output import report, report_json

    if asks_for_json(sys.argv):
        with contextlib.suppress(OSError):  # stdout itself may be what is full
            report_json(error)
    report(error)
    sys.exit(error.exit_code)
