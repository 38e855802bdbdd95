"""`primeslurm calibrate`: measure the rates of a cluster's nodes, and write them to the site file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from primeslurm.api.calibration import load_calibration, measured_by, site_change
from primeslurm.api.runs.run import Run
from primeslurm.base.errors import ExitCode
from primeslurm.cli import options
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.tables import light_table, out
from primeslurm.records.measured_rates import CalibrationRecord


def calibrate(
    site: options.SiteOpt = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Nodes that measure together. Default: 2; with --local 1.", metavar="N"),
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", help="Partition to measure. Default: the trainer's.", metavar="P")
    ] = None,
    local: options.LocalOpt = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the batch script, but submit nothing.")] = False,
    yes: options.YesOpt = False,
    as_json: options.JsonOpt = False,
) -> None:
    """Measure the rates of a cluster's nodes for the planner.

    A job of less than a minute measures matrix products, memory, network and file system. The command waits for it,
    shows its rates as a change of the site file, and writes them there. Estimates use them in place of data sheets.

    Examples:
        primeslurm calibrate
        primeslurm calibrate --partition gpu --nodes 4 --dry-run
    """
    calibration = load_calibration(site, nodes=nodes, partition=partition, local=local)
    if dry_run:
        sys.stdout.write(calibration.dry_run().script)
        note("dry run: nothing was written or submitted")
        return
    from primeslurm.cli.verbs.watch import watch_until_done

    submitted, file = calibration.start(), calibration.site_file
    note(f"submitted {submitted.plan.run} as {submitted.plan.executor} job {submitted.job_id}")
    run_dir = Path(submitted.plan.run_dir)
    if watch_until_done(Run(run_dir)) is not ExitCode.DONE:
        raise typer.Exit(ExitCode.FAILED)
    record = measured_by(run_dir)
    change = site_change(file, record) if file else None
    if as_json:
        print_json(msgspec.to_builtins(record) | {"site_file": str(file) if file else None})
    else:
        _show(record)
        out.print(change.diff if change else "", markup=False, highlight=False, soft_wrap=True)
    if change is None:
        note(f"this machine has no site file to write to; --site names one. The rates are in {run_dir}")
        return
    options.confirm(f"Write this to {file}?", yes)
    change.write()
    note(f"wrote {file}")


def _show(record: CalibrationRecord) -> None:
    table = light_table("rate", "median", "lowest", "highest", title=f"partition {record.partition}")
    for name, rate in (record.rates | record.products).items():
        table.add_row(name, *(f"{value:.3g}" for value in (rate.median, rate.low, rate.high)))
    out.print(table)
