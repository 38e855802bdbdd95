"""`primeslurm rollouts`: list, show and export the rollouts of a run."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from primeslurm.api.runs.rollout_export import export_problems, export_rollouts
from primeslurm.api.runs.run import Run, find_run
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.units import count
from primeslurm.cli.options import JsonOpt, RunArg, RunsOpt
from primeslurm.cli.output import note, print_json, warn
from primeslurm.cli.views.rollouts import rollout_table, transcript_lines
from primeslurm.cli.views.tables import out
from primeslurm.records.rollouts import RolloutSummary
from primeslurm.run.rollouts.query import RolloutQuery

LIMIT = 50
FOLLOW_S = 2.0  # interval between two looks for new rollouts


def rollouts(
    run: RunArg,
    rollout: Annotated[
        str | None, typer.Argument(help="Id of a rollout, or a part that no other id has.", metavar="ID")
    ] = None,
    runs: RunsOpt = None,
    step: Annotated[
        str | None, typer.Option("--step", help="Step, or first and last step.", metavar="N|FIRST:LAST")
    ] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", help="Label of an environment.", metavar="NAME")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option("--reward", help="Range of rewards, for example 0.5: or :0.2.", metavar="MIN:MAX"),
    ] = None,
    group: Annotated[str | None, typer.Option("--group", help="Group of rollouts of one prompt.", metavar="ID")] = None,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="Policy version that sampled a token.", metavar="N")
    ] = None,
    truncated: Annotated[bool, typer.Option("--truncated", help="Only rollouts that reached a token limit.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only rollouts that failed.")] = False,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Only rollouts of evaluations.")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="Only rollouts that were not trained, with why.")] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Number of newest rollouts. Default: 50; exports: all.", metavar="N"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="List new rollouts until the run ends.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="With an id, list every token.")] = False,
    full: Annotated[bool, typer.Option("--full", help="With an id, show long texts whole.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write rollouts to a .jsonl or .parquet file.", metavar="FILE")
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Read what the policy wrote, and how it was trained.

    Without an id, list rollouts. With an id, show one: messages, tool calls and their results, reward, advantages,
    policy versions, log-probabilities and times. `monitor.rollouts` of the recipe says how many are kept.

    Examples:
        primeslurm rollouts my-run
        primeslurm rollouts my-run --step 10:20 --reward :0.2
        primeslurm rollouts my-run math-problems-00000012/3
        primeslurm rollouts my-run --evaluation --export samples.parquet
    """
    query, problems = _query(step, reward, environment, group, version)
    flags = {"truncated": truncated, "failed": failed, "evaluation": evaluation, "dropped": dropped}
    query = msgspec.structs.replace(query, **{name: True for name, value in flags.items() if value})
    problems += _conflicts(rollout, export, follow, tokens=tokens, full=full, filters=query != RolloutQuery())
    if problems:
        raise UsageError(problems)
    found = find_run(run, runs)
    if rollout is not None and export is None:
        _show(found, rollout, tokens=tokens, full=full, as_json=as_json)
    elif export is not None:
        _export(found, query, rollout, limit, export, as_json)
    elif follow:
        _follow(found, query, limit or LIMIT, as_json)
    else:
        _list(found, query, limit or LIMIT, as_json)


def _show(run: Run, id: str, *, tokens: bool, full: bool, as_json: bool) -> None:
    transcript = run.rollouts().get(id)
    if as_json:
        print_json(msgspec.to_builtins(transcript))
        return
    for line in transcript_lines(transcript, full=full, tokens=tokens):
        out.print(line, soft_wrap=True)


def _list(run: Run, query: RolloutQuery, limit: int, as_json: bool) -> None:
    page = run.rollouts().page(query, limit=limit)
    for problem in page.problems:
        note(f"warning: {problem}")
    if as_json:
        print_json(msgspec.to_builtins(page.rollouts))
    elif page.total:
        out.print(rollout_table(page.rollouts))
    if not page.total:
        note(f"no rollout of {run.name} was kept" if query == RolloutQuery() else "no rollout fits")
    elif page.total > len(page.rollouts):
        note(f"{len(page.rollouts):,} of {count(page.total, 'rollout')}; --limit shows more")


def _follow(run: Run, query: RolloutQuery, limit: int, as_json: bool) -> None:
    archive = run.rollouts()
    _print_lines(archive.fresh(query)[-limit:], as_json)
    while run.status(if_silent=warn).active:
        time.sleep(FOLLOW_S)
        _print_lines(archive.fresh(query), as_json)
    _print_lines(archive.fresh(query), as_json)


def _print_lines(rollouts: list[RolloutSummary], as_json: bool) -> None:
    if as_json:
        sys.stdout.write("".join(msgspec.json.encode(each).decode() + "\n" for each in rollouts))
    elif rollouts:
        out.print(rollout_table(rollouts))
    sys.stdout.flush()


def _export(run: Run, query: RolloutQuery, id: str | None, limit: int | None, path: Path, as_json: bool) -> None:
    archive = run.rollouts()
    one = [archive.get(id)] if id is not None else None
    exported = export_rollouts(lambda: one or archive.transcripts(query, limit=limit), path)
    for problem in archive.problems:
        note(f"warning: {problem}")
    if as_json:
        print_json({"file": str(path), "rollouts": exported})
    else:
        out.print(str(path), soft_wrap=True)
        note(f"{count(exported, 'rollout')} exported")


def _query(
    step: str | None, reward: str | None, environment: str | None, group: str | None, version: int | None
) -> tuple[RolloutQuery, list[Violation]]:
    problems: list[Violation] = []
    steps = None
    if step is not None:
        first, colon, last = step.partition(":")
        bounds = (first or "0", (last or str(sys.maxsize)) if colon else first)
        if all(bound.isascii() and bound.isdecimal() and len(bound) < 20 for bound in bounds) and step != ":":
            steps = (int(bounds[0]), int(bounds[1]))
        else:
            problems.append(Violation("--step", step, "is no step", "write for example 12, 10:20 or 10:"))
    low, high = -math.inf, math.inf
    if reward is not None:
        first, colon, last = reward.partition(":")
        try:
            if not colon or reward == ":":
                raise ValueError
            limits = float(first or -math.inf), float(last or math.inf)
            if any(map(math.isnan, limits)):
                raise ValueError
            low, high = limits
        except ValueError:
            problems.append(Violation("--reward", reward, "is no range", "write for example 0.5:1, 0.5: or :0.2"))
    if steps is not None and steps[0] > steps[1]:
        problems.append(Violation("--step", str(step), "ends before it begins"))
    if low > high:
        problems.append(Violation("--reward", str(reward), "ends before it begins"))
    return RolloutQuery(steps, environment, group, version, low, high), problems


def _conflicts(
    id: str | None, export: Path | None, follow: bool, *, tokens: bool, full: bool, filters: bool
) -> list[Violation]:
    problems = [] if export is None else export_problems(export)
    if follow and export is not None:
        problems.append(Violation("--follow", "", "cannot be combined with --export"))
    if follow and id is not None:
        problems.append(Violation("--follow", "", "lists rollouts, so it takes no ID"))
    if id is not None and filters:
        problems.append(Violation("ID", id, "is one rollout, so filters do not apply", "leave out either"))
    if id is None or export is not None:
        given = [name for name, is_given in (("--tokens", tokens), ("--full", full)) if is_given]
        problems += [Violation(name, "", "needs the ID of a rollout to show") for name in given]
    return problems
