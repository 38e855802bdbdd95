"""The command line. Each module of `verbs` parses words, calls `primeslurm.api`, prints, and sets an exit code."""

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
from primeslurm.base.errors import PrimeslurmError
from primeslurm.cli.lazy_verbs import VerbGroup, asks_for_json

# Allocations between two garbage collections. A recipe and its plan are that many objects, and all of them stay alive:
# with Python's default of 700, collections took a twelfth of the time of `render`.
GARBAGE_AFTER = 300_000
DOCS = "https://github.com/primeslurm/primeslurm/tree/main/docs"

EPILOG = f"""Examples:
primeslurm check my.yaml                    find errors
primeslurm plan my.yaml                     see whether it fits
primeslurm submit my.yaml                   submit it as one Slurm job
primeslurm submit my.yaml --local --wait    run it on this machine
primeslurm status --watch                   follow the newest run
primeslurm doctor my-run                    find out why a run failed

`primeslurm VERB --help` explains a verb.
Documentation: {DOCS}"""

app = typer.Typer(
    name="primeslurm",
    cls=VerbGroup,
    help="Asynchronous RL post-training of large MoE models on Slurm: one recipe, one job.",
    epilog=EPILOG,
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
    """Make stdout and stderr accept every text.

    A closed stream (`>&-`, some daemons) is replaced by one that discards its text. Characters that stdout cannot
    encode (with LC_ALL=C, for example) become question marks.
    """
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - open for as long as the process lives
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Run the `primeslurm` command. A `PrimeslurmError` becomes one message and an exit code."""
    gc.set_threshold(GARBAGE_AFTER)
    prepare_streams()
    try:
        app(prog_name="primeslurm")
    except PrimeslurmError as error:
        _fail(error)
    except OSError as error:  # a full disk, a directory that may not be written
        _fail(PrimeslurmError(f"{error.filename}: {error.strerror}" if error.filename else str(error)))


def _fail(error: PrimeslurmError) -> NoReturn:
    from primeslurm.cli.output import report, report_json

    # Scripts read the error from stdout, people from stderr.
    if asks_for_json(sys.argv):
        with contextlib.suppress(OSError):  # stdout itself may be on the full disk
            report_json(error)
    report(error)
    sys.exit(error.exit_code)
