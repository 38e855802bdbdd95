"""A schedule of any length, over as many runs as it needs, and a table of the cost of each kind of fault."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.faulty_deployment import FaultyDeployment
from tests.chaos.runner import Chaos, Log, Outcome, Result, log_nothing
from tests.chaos.schedule import Round

TOGETHER = "two at once"
"""The row of rounds with overlapping faults."""


def run_all(
    deployment: FaultyDeployment, seed: int, rounds: list[Round], steps: int, log: Log = log_nothing
) -> Iterable[Result]:
    """Inject all rounds, in runs of `steps` steps one after another. Yield each run that has ended."""
    rounds = list(rounds)
    while rounds:
        log(f"a run of {steps} steps; {sum(map(len, rounds))} faults are left")
        result = Chaos(deployment, seed, steps, log).run(rounds)
        for problem in result.problems:
            log(f"PROBLEM {problem}")
        yield result


def again(seed: int, faults: int, overlap: float, kinds: list[str] | None, steps: int) -> str:
    """Return the command that repeats a schedule."""
    only = "".join(f" --kind {kind!r}" for kind in kinds or [])
    return f"python -m tests.chaos --seed {seed} --faults {faults} --overlap {overlap} --steps {steps}{only}"


def table(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Summarise the cost of each kind, by name."""
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kinds[0] if len(outcome.kinds) == 1 else TOGETHER].append(outcome)
    return [
        {
            "kind": kind,
            "rounds": len(rounds),
            "median_s": statistics.median(outcome.seconds for outcome in rounds),
            "worst_s": max(outcome.seconds for outcome in rounds),
            "median_without_step_s": statistics.median(outcome.longest_step_s for outcome in rounds),
            "new_attempts": sum(outcome.new_attempts for outcome in rounds),
            "over_goal": sum(outcome.seconds > outcome.goal_s for outcome in rounds),
        }
        for kind, rounds in sorted(by_kind.items())
    ]


def summary(results: list[Result]) -> dict[str, Any]:
    """Return the results of a campaign, for JSON."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    fates = [result.fates for result in results]
    return {
        "runs": len(results),
        "faults": sum(len(outcome.kinds) for outcome in outcomes),
        "missed": sum(result.missed for result in results),
        "steps": sum(result.steps for result in results),
        "attempts": sum(result.attempts for result in results),
        "committed_steps_lost": sum(result.committed_steps_lost for result in results),
        "finished_rollouts": {
            name: sum(getattr(fate, name) for fate in fates)
            for name in ("trained", "spooled", "stale", "undone", "lost")
        },
        "problems": [problem for result in results for problem in result.problems],
        "load_median": statistics.median([outcome.load for outcome in outcomes] or [0.0]),
        "kinds": table(outcomes),
        "rounds": [asdict(outcome) for outcome in outcomes],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = ["| fault | rounds | median s | worst s | new attempts |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row["kind"], row["rounds"], f"{row['median_s']:.0f}", f"{row['worst_s']:.0f}", row["new_attempts"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def keep_failed(deployment: FaultyDeployment, result: Result, directory: Path | None) -> None:
    """Copy a run with problems for later inspection."""
    if result.problems and directory is not None:
        deployment.keep(directory)
