"""The command line: one file per family of verbs.

Exit codes: 0 done, 1 the run (or something unforeseen) failed, 2 bad input, 3 Slurm refused or did not answer,
4 a run directory is missing or damaged.
"""

from __future__ import annotations

import sys
from itertools import takewhile

import typer

from primeslurm import __version__
from primeslurm.cli import attach, cluster, diff, doctor, export, inspect, nodes, report, runs, submit, watch
from primeslurm.cli.output import note, report_json
from primeslurm.cli.output import report as report_error
from primeslurm.errors import PrimeslurmError

app = typer.Typer(
    name="primeslurm",
    help="Asynchronous RL post-training of large MoE models on Slurm: one recipe, one command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


app.command("submit")(submit.submit)
app.command("resume")(submit.resume)
app.command("status")(watch.status)
app.command("summary")(watch.summary)
app.command("logs")(watch.logs)
app.command("attach")(attach.attach)
app.command("doctor")(doctor.doctor)
app.command("diff")(diff.diff_)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("cancel")(runs.cancel)
app.command("runs")(runs.runs)
app.command("nodes")(nodes.nodes)
app.command("plan")(inspect.plan)
app.command("render")(inspect.render_)
app.command("check")(inspect.check)
app.command("schema")(inspect.schema)
app.add_typer(cluster.app, name="cluster")


def main() -> None:
    """Entry point of the `primeslurm` command: an error of ours becomes one message and its exit code."""
    try:
        app()
    except PrimeslurmError as error:
        if "--json" in takewhile(lambda word: word != "--", sys.argv):
            report_json(error)
        report_error(error)
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a directory that may not be written
        note(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
        sys.exit(PrimeslurmError.exit_code)
