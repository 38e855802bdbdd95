"""`primeslurm runs` and `cancel`: list all runs, and stop one."""

from __future__ import annotations

from typing import Annotated

import typer

from primeslurm.api.runs.run import Run, all_runs, find_run
from primeslurm.api.sites import runs_directory
from primeslurm.base.errors import RunError
from primeslurm.cli.options import JsonOpt, RunArg, RunsOpt, YesOpt, confirm
from primeslurm.cli.output import note, print_json, warn
from primeslurm.cli.views.status import phase_of
from primeslurm.cli.views.tables import light_table, out
from primeslurm.run.status.run_status import RunStatus


def runs(runs: RunsOpt = None, as_json: JsonOpt = False) -> None:
    """List all runs.

    Examples:
        primeslurm runs
        primeslurm runs --json
    """
    rows = [row for run in all_runs(runs) if (row := _row(run)) is not None]
    if as_json:
        keys = ("run", "run_id", "phase", "attempt", "job_id", "step", "max_steps", "committed_step", "directory")
        print_json([{key: getattr(row, key) for key in keys} for row in rows])
        return
    if not rows:
        note(f"no runs in {runs_directory(runs)}")
        return
    table = light_table("run", "phase", "attempt", "job", "step", "committed")
    for row in rows:
        steps = f"{row.metrics.get('step', row.step or 0)}/{row.max_steps}"
        committed = "-" if row.committed_step is None else str(row.committed_step)
        table.add_row(row.run, phase_of(row), str(row.attempt), row.job_id or "-", steps, committed)
    out.print(table)


def _row(run: Run) -> RunStatus | None:
    try:
        return run.status(if_silent=warn)
    except RunError as error:
        warn(error)
        return None


def cancel(
    run: RunArg,
    runs: RunsOpt = None,
    now: Annotated[bool, typer.Option("--now", help="Do not write a last checkpoint.")] = False,
    yes: YesOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Stop a run cleanly and cancel its job.

    The trainer writes a last checkpoint first, unless `--now` is given. `primeslurm resume` continues from there.

    Examples:
        primeslurm cancel my-run
        primeslurm cancel my-run --now --yes
    """
    selected = find_run(run, runs)
    confirm(f"Stop {selected.name}" + (" without a last checkpoint?" if now else "?"), yes)
    cancelled = selected.cancel(now=now, if_silent=warn)
    phase = "cancelled" if cancelled else selected.status(if_silent=warn).phase
    if as_json:
        print_json({"run": selected.name, "cancelled": cancelled, "phase": phase})
    elif cancelled:
        trained, saved = selected.last_steps()
        if trained > saved and not now:
            note(f"the trainer ended before it wrote a last checkpoint: it had trained step {trained}")
        start = f"from step {saved}" if saved else "from the beginning"
        if selected.plan().task == "tenants":
            start = "all tenants from their checkpoints"
        note(f"{selected.name} is cancelled; continue {start} with: primeslurm resume {selected.name}")
    else:
        note(f"{selected.name} is {phase}: nothing to cancel")
