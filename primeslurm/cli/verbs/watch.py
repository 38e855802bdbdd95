"""`primeslurm status`, `logs` and `summary`: show what a run does, and how it went."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.live import Live

from primeslurm.api.runs.logs import Tail, log_files, logs_of
from primeslurm.api.runs.run import Run, all_runs, find_run
from primeslurm.api.sites import runs_directory
from primeslurm.base.errors import ExitCode, RunError
from primeslurm.base.units import count, duration, number
from primeslurm.cli.options import AttemptOpt, JsonOpt, RunArg, RunsOpt
from primeslurm.cli.output import note, plain, print_json, warn
from primeslurm.cli.views.status import failures_text, one_line, process_table, view
from primeslurm.cli.views.tables import err, out
from primeslurm.records.fleet import outcome_text
from primeslurm.run.status.run_status import EMULATED
from primeslurm.run.status.summary import Summary

# Interval between two queries of a run's status.
REFRESH_S = 1.0
# Interval between two reads of its logs.
FOLLOW_S = 0.5


def status(
    run: Annotated[
        str | None,
        typer.Argument(help="Name or directory of a run. Default: the newest run.", metavar="RUN", show_default=False),
    ] = None,
    runs: RunsOpt = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run ends.")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="List every process with its node and PID.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Show what a run is doing.

    Examples:
        primeslurm status
        primeslurm status my-run --watch
    """
    if run is None:
        existing = all_runs(runs)
        if not existing:
            raise RunError(f"there is no run in {runs_directory(runs).absolute()} (primeslurm submit starts one)")
        selected = existing[-1]
    else:
        selected = find_run(run, runs)
    # `--json` prints the status once, because a script polls at its own interval.
    if watch and not as_json:
        raise typer.Exit(watch_until_done(selected))
    current = selected.status(processes=processes, if_silent=warn)
    if as_json:
        print_json(msgspec.to_builtins(current))
        return
    out.print(view(current))
    if processes:
        out.print(process_table(current))


def watch_until_done(run: Run, *, poll_s: float = REFRESH_S) -> ExitCode:
    """Show live progress until the run has ended, and return the exit code."""
    looks = run.watch(poll_s=poll_s, if_silent=warn)
    current = next(looks)
    if err.is_terminal:
        with Live(view(current), console=err, refresh_per_second=4, transient=False) as live:
            for current in looks:
                live.update(view(current))
    else:
        # A log file gets one line per step, not one per second.
        printed = -1.0
        for current in looks:
            step = current.metrics.get("step", 0)
            if step != printed:
                printed = step
                note(one_line(current))
        err.print(view(current))
    note(f"{current.run}: {outcome_text(current.phase, current.reason)}")
    return ExitCode.DONE if current.phase == "completed" else ExitCode.FAILED


def logs(
    run: RunArg,
    role: Annotated[
        str | None, typer.Argument(help="Role or process, for example trainer or decode-r0-0.", metavar="PROCESS")
    ] = None,
    runs: RunsOpt = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of last lines of each log.", metavar="N")
    ] = 20,
    attempt: AttemptOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Print the logs of a run's processes.

    Each line begins with the name of its process. With `--json`, each line is an object with `process` and `line`.

    Examples:
        primeslurm logs my-run
        primeslurm logs my-run trainer-rank-0 --follow
    """
    selected = find_run(run, runs)
    log_files(selected.attempt(attempt), role, selected.name)  # raises if there is no such log
    tail = Tail(lambda: logs_of(selected.attempt(attempt), role), lines)  # a requeued job has another attempt
    _print(tail.first(), as_json)
    while follow and selected.status(if_silent=warn).active:
        time.sleep(FOLLOW_S)
        _print(tail.more(), as_json)
    _print(tail.more(ended=True), as_json)


def _print(lines: Iterable[tuple[Path, str]], as_json: bool) -> None:
    for path, line in lines:
        text = json.dumps({"process": path.stem, "line": line}) if as_json else f"{path.stem} | {plain(line)}"
        sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def summary(run: RunArg, runs: RunsOpt = None, as_json: JsonOpt = False) -> None:
    """Show what a run achieved: reward or loss, staleness, speed.

    Examples:
        primeslurm summary my-run
    """
    results = find_run(run, runs).summary()
    if as_json:
        print_json(msgspec.to_builtins(results))
        return
    time_taken = f"{count(results.steps, 'step')} in {duration(results.seconds)}"
    out.print(f"{results.run}: {time_taken}, {count(results.attempts, 'attempt')}")
    if results.emulated:
        out.print(EMULATED)
    for record in results.evaluations:
        out.print(f"evaluation of step {record.step}: {'; '.join(result.words for result in record.results)}")
    if results.task == "eval":
        return
    if results.task == "sft":
        if results.first_loss is not None:
            out.print(f"loss: {results.first_loss:.4f} (first steps) -> {results.last_loss:.4f} (last)")
        out.print(f"restarts: {results.engine_restarts}; {number(results.trained_tokens_per_s)} trained tokens/s")
        _print_gpus(results)
        return
    if results.gain is not None:
        out.print(
            f"reward: {results.first_reward:.3f} (first steps) -> {results.last_reward:.3f} (last), {results.gain:+.3f}"
        )
    if results.best is not None:
        out.print(f"best: step {results.best.step}, {results.best.metric} {results.best.value:.3f}")
    out.print(f"rollouts sampled by several policy versions: {number(results.mixed_version_rollouts)}")
    dropped = f"{count(results.dropped_stale, 'rollout')} dropped as too old"
    out.print(f"staleness: at most {count(round(results.staleness_max), 'version')}; {dropped}")
    for label, failed in sorted(results.failures.items()):
        out.print(f"{label}: {failures_text(failed)}")
    if results.mismatch_kl_max is not None:
        out.print(f"KL between trainer and engines: at most {results.mismatch_kl_max:.1e}")
    out.print(f"restarts: {results.engine_restarts}; {number(results.tokens_per_s)} sampled tokens/s")
    _print_gpus(results)


def _print_gpus(results: Summary) -> None:
    for role, hours in results.gpu_hours.items():
        mfu = f", MFU {results.mfu:.1%}" if role == "trainer" and results.mfu is not None else ""
        out.print(f"{role}: {hours:.3g} GPU-hours, {results.idle_fraction[role]:.0%} idle{mfu}")
    if results.first_step_seconds is not None:
        out.print(f"time to first step: {duration(results.first_step_seconds)}")
