"""Verbs that watch a run: status and logs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.live import Live

from primeslurm.cli.dashboard import one_line, process_table, view
from primeslurm.cli.options import JsonOpt
from primeslurm.cli.output import err, note, out, print_json
from primeslurm.cli.runs import (
    RunArg,
    RunsOpt,
    all_runs,
    attempt_of,
    find_run,
    job_query,
    reading,
    runs_directory,
    status_of,
    strict_job_query,
)
from primeslurm.errors import ClusterError, RunError, UsageError, Violation
from primeslurm.recipe.explain import suggestion
from primeslurm.run.directory import RunDirectory
from primeslurm.run.summary import summarise

REFRESH_S = 1.0
FAILED_RUN = 1


def status(
    run: Annotated[str | None, typer.Argument(help="Run; default: the newest.", show_default=False)] = None,
    runs: RunsOpt = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run has ended.")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="List every process with its node and pid.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Show what a run is doing."""
    if run is None:
        known = all_runs(runs_directory(runs))
        if not known:
            raise RunError(f"no runs in {runs_directory(runs)}")
        directory = known[-1]
    else:
        directory = find_run(run, runs)
    if watch and not as_json:
        raise typer.Exit(watch_until_done(directory))
    current = status_of(directory, job_query(directory), processes=processes)
    if as_json:
        print_json(msgspec.to_builtins(current))
        return
    out.print(view(current))
    if processes:
        out.print(process_table(current))


def watch_until_done(directory: RunDirectory) -> int:
    """Show live progress until the run has ended. Returns the exit code: 0 if it completed. Raises ClusterError."""
    query = strict_job_query(directory)
    current = status_of(directory, query)
    printed = -1
    with Live(view(current), console=err, refresh_per_second=4, transient=False) as live:
        while current.active:
            time.sleep(REFRESH_S)
            try:
                current = status_of(directory, query)
            except ClusterError as error:  # its controller is busy, or starts again: no job ends of that
                note(f"warning: {error}")
                continue
            live.update(view(current))
            step = current.metrics.get("step", 0)
            if not err.is_terminal and step != printed:
                printed = step
                note(one_line(current))
    note(f"{current.run}: {current.phase}" + (f" ({current.reason})" if current.reason else ""))
    return 0 if current.phase == "completed" else FAILED_RUN


def logs(
    run: RunArg,
    role: Annotated[str | None, typer.Argument(help="Role or process, for example trainer or decode-r0-0.")] = None,
    runs: RunsOpt = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the logs grow.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = 20,
    attempt: Annotated[int | None, typer.Option("--attempt", help="Default: the newest.")] = None,
) -> None:
    """Print the logs of a run's processes, each line with the name of its process."""
    directory = find_run(run, runs)
    chosen = attempt_of(directory, attempt)
    files = sorted((chosen.path / "logs").rglob("*.log"))
    picked = [f for f in files if role is None or role in (f.stem, f.parent.name)]
    if not files:
        raise RunError(f"no process of attempt {chosen.number} of {directory.name} has a log")
    if not picked:
        valid = sorted({f.parent.name for f in files} | {f.stem for f in files})
        raise UsageError([Violation("ROLE", str(role), "no such log", suggestion(str(role), valid))])
    offsets = {path: _print_tail(path, lines) for path in picked}
    query = job_query(directory)
    while follow and status_of(directory, query).active:
        time.sleep(0.5)
        for path in picked:
            offsets[path] = _print_from(path, offsets[path])


def _print_tail(path: Path, lines: int) -> int:
    text = path.read_bytes()
    _print_lines(path, text.splitlines()[-lines:] if lines else [])
    return len(text)


def _print_from(path: Path, offset: int) -> int:
    with path.open("rb") as handle:
        handle.seek(offset)
        text = handle.read()
    whole = text[: text.rfind(b"\n") + 1]
    _print_lines(path, whole.splitlines())
    return offset + len(whole)


def _print_lines(path: Path, lines: list[bytes]) -> None:
    for line in lines:
        sys.stdout.write(f"{path.stem} | {line.decode(errors='replace')}\n")
    sys.stdout.flush()


def summary(run: RunArg, runs: RunsOpt = None, as_json: JsonOpt = False) -> None:
    """Show what a run achieved: reward (or loss), versions, staleness, mismatch, restarts."""
    directory = find_run(run, runs)
    with reading(directory):
        found = summarise(directory)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    out.print(f"{found.run}: {found.steps} steps in {found.seconds:.0f} s, {found.attempts} attempt(s)")
    if found.task == "sft":
        if found.first_loss is not None:
            out.print(f"loss: {found.first_loss:.4f} (first steps) -> {found.last_loss:.4f} (last)")
        out.print(f"restarts: {found.engine_restarts}; {found.trained_tokens_per_s:.0f} trained tokens/s")
        return
    if found.gain is not None:
        out.print(
            f"reward: {found.first_reward:.3f} (first steps) -> {found.last_reward:.3f} (last), {found.gain:+.3f}"
        )
    out.print(f"rollouts of several policy versions: {found.mixed_version_rollouts}")
    out.print(
        f"staleness: at most {found.staleness_max:.0f} versions; {found.dropped_stale} rollouts dropped as too old"
    )
    if found.mismatch_kl_max is not None:
        out.print(f"KL between trainer and engines: at most {found.mismatch_kl_max:.1e}")
    out.print(f"restarts: {found.engine_restarts}; {found.tokens_per_s:.0f} sampled tokens/s")
