"""`primeslurm calibrate`: measure the rates of a cluster's nodes, and write them to the site file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.api import calibration as api
from primeslurm.api.runs.run import Run, find_run
from primeslurm.api.sites import site_file
from primeslurm.base.errors import ExitCode, UsageError, Violation
from primeslurm.cli import options
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.tables import light_table, out
from primeslurm.records.calibration import CalibrationRecord


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
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the job, and write its rates.")] = False,
    run: Annotated[
        str | None, typer.Option("--run", help="Write the rates of an earlier calibration.", metavar="RUN")
    ] = None,
    yes: options.YesOpt = False,
    as_json: options.JsonOpt = False,
) -> None:
    """Measure the rates of a cluster's nodes for the planner.

    A job of less than a minute measures matrix products, memory, network and file system. Its rates are shown as a
    change of the site file, and then written there. All estimates use them in place of data sheets.

    Examples:
        primeslurm calibrate --wait
        primeslurm calibrate --partition gpu --nodes 4 --dry-run
        primeslurm calibrate --run calibrate-20261130-130500
    """
    if run is not None:
        given = {"--nodes": nodes, "--partition": partition, "--local": local, "--dry-run": dry_run, "--wait": wait}
        why = "measures, and --run writes what was measured before"
        if wrong := [Violation(name, "", why, "keep one of them") for name, value in given.items() if value]:
            raise UsageError(wrong)
        directory, file = find_run(run).path, site_file(site)
        if file is None:
            raise UsageError([Violation("--site", str(site or ""), "there is no such site file")])
        if problems := api.unwritable(file):
            raise UsageError(problems)
        _write(directory, file, yes, as_json)
        return
    calibration = api.load_calibration(site, nodes=nodes, partition=partition, local=local)
    if dry_run:
        result = calibration.dry_run()
        if as_json:
            print_json({"plan": result.plan.model_dump(mode="json", by_alias=True), "script": result.script})
        else:
            sys.stdout.write(result.script)
        note("dry run: nothing was written or submitted")
        return
    submitted = calibration.start()
    plan = submitted.plan
    note(f"submitted {plan.run} as {plan.executor} job {submitted.job_id}")
    if not wait:
        if as_json:
            print_json({"run": plan.run, "directory": plan.run_dir, "job_id": submitted.job_id})
        note(f"when it has ended, write its rates: primeslurm calibrate --run {shlex.quote(plan.run_dir)}")
        return
    from primeslurm.cli.verbs.watch import watch_until_done

    if watch_until_done(Run(Path(plan.run_dir))) is not ExitCode.DONE:
        raise typer.Exit(ExitCode.FAILED)
    _write(Path(plan.run_dir), calibration.site_file, yes, as_json)


def _write(run_dir: Path, file: Path | None, yes: bool, as_json: bool) -> None:
    """Show the rates of a run, and write them to the site file if there is one."""
    record = api.measured(run_dir)
    change = api.site_change(file, record) if file else None
    if as_json:
        print_json({"rates": api.as_json(record), "site_file": str(file) if file else None})
    else:
        _show(record)
    if change is None:
        note(
            f"nothing was written, because this machine has no site file; --site names one. The rates are in {run_dir}"
        )
        return
    if not as_json:
        out.print(change.diff, markup=False, highlight=False, soft_wrap=True)
    options.confirm(f"Write this to {file}?", yes)
    change.write()
    note(f"wrote {file}")


def _show(record: CalibrationRecord) -> None:
    table = light_table("rate", "median", "lowest", "highest", title=f"{record.partition}: {record.device_name}")
    for name, rate in (record.rates | record.products).items():
        table.add_row(name, *(f"{value:.3g}" for value in (rate.median, rate.low, rate.high)))
    out.print(table)
