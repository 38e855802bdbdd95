"""Data about runs for the pages, read from run directories and kept while the files do not change."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from math import inf
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from primeslurm.base import files
from primeslurm.base.errors import RunError
from primeslurm.dashboard.event_log import EventLog
from primeslurm.dashboard.job_states import JobStates
from primeslurm.dashboard.log_page import log_files
from primeslurm.dashboard.metric_table import MetricTable
from primeslurm.dashboard.rollout_pages import RolloutPages
from primeslurm.dashboard.text import encodable
from primeslurm.plan.plan_file import plain
from primeslurm.records import resolved_recipe
from primeslurm.records.attempt import newest_attempt
from primeslurm.records.evaluation import SUMMARY, best_of, evaluations, step_dir
from primeslurm.records.metrics import FILE
from primeslurm.run.diagnosis.validity import CHECKED, problems
from primeslurm.run.diff import recipe_diff
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.history import dropped_rollouts
from primeslurm.run.overview import RunOverview, read_overview
from primeslurm.run.status.liveness import RECHECK_S, SILENT_S
from primeslurm.run.status.plan_outline import read_outline
from primeslurm.run.status.run_status import read_status

T = TypeVar("T")
P = ParamSpec("P")
# Seconds for which a status is used again, so that several viewers cost as much as one.
FRESH_S = 1.5
# The same for the list of all runs.
LIST_FRESH_S = 4.0
# Longest time that the page of one run waits for Slurm's first answer [s].
SLURM_WAIT_S = 1.0
# Runs whose metrics and events are kept in memory.
OPEN_RUNS = 16
# Errors that files of a damaged run, or of another release, cause.
_DAMAGED = (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def _reading(method: Callable[Concatenate[RunData, P], T]) -> Callable[Concatenate[RunData, P], T]:
    """Make a method of `RunData` raise RunError if a file of the run is damaged."""

    @wraps(method)
    def read(self: RunData, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except _DAMAGED as error:
            raise RunError(f"{self.run.name} is damaged, or was made by another release ({error})") from error

    return read


class RunData:
    """One run."""

    def __init__(self, run: RunDirectory, states: JobStates, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self.identity = _identity(run)
        self._states, self._clock = states, clock
        self._lock = threading.RLock()
        self._overview: RunOverview | None = None
        self._signature: object = None
        self._head_file: object = None
        self._head_wrote = -inf
        self._invalid: tuple[object, list[str]] | None = None
        self._statuses: dict[bool, tuple[float, dict[str, Any]]] = {}

    @cached_property
    def table(self) -> MetricTable:
        return MetricTable(self.run.path)

    @cached_property
    def events(self) -> EventLog:
        return EventLog(self.run)

    @cached_property
    def rollouts(self) -> RolloutPages:
        return RolloutPages(self.run.path)

    def forget(self) -> None:
        """Free the memory of metrics, events and rollouts. They are read again if somebody asks for them."""
        for name in ("table", "events", "rollouts"):
            self.__dict__.pop(name, None)

    def overview(self) -> RunOverview:
        """Return the line of the list of runs. A damaged run has the phase `damaged`."""
        with self._lock:
            try:
                attempt = self.run.attempt(newest_attempt(self.run.path))
                signature = self._files(attempt)
                if self._overview is None or self._overview.active or signature != self._signature:
                    self._overview = read_overview(
                        self.run, self._states.of(self.run), time.time(), recheck_s=self._recheck_s(attempt)
                    )
                    self._signature = signature
            except (RunError, *_DAMAGED) as error:
                self._overview = _damaged(self.run, error)
            return self._overview

    def _recheck_s(self, attempt: Attempt) -> float:
        """Return how long to watch a file of the head that looks old [s].

        Watching would delay the pages of many dead runs. A head that was seen to write is worth it: its clock differs.
        """
        about = files.status(attempt.fleet_file)
        seen = (about.st_ino, about.st_mtime_ns, about.st_size) if about else None
        if seen != self._head_file:
            self._head_wrote = -inf if self._head_file is None else self._clock()
            self._head_file = seen
        return RECHECK_S if self._clock() - self._head_wrote < 3 * SILENT_S else 0.0

    def _files(self, attempt: Attempt) -> object:
        # The files from which `read_overview` reads, except those that change while a run is active.
        names = ("end.json", "job.json")
        paths = [self.run.path / "attempts", self.run.path / FILE, *(attempt.path / name for name in names)]
        return [(about.st_mtime_ns, about.st_size) if (about := files.status(path)) else None for path in paths]

    @_reading
    def status(self, *, processes: bool = False) -> dict[str, Any]:
        """Return `RunStatus`, and why the run is invalid. Raises RunError."""
        with self._lock:
            read_at, status = self._statuses.get(processes, (0.0, {}))
            if not status or self._clock() - read_at > FRESH_S:
                query = self._states.of(self.run, SLURM_WAIT_S)
                recheck_s = self._recheck_s(self.run.latest())
                status = msgspec.to_builtins(read_status(self.run, query, processes=processes, recheck_s=recheck_s))
                status["created_at"] = self.run.created_at
                status["invalid"] = self._problems()
                self._statuses[processes] = (self._clock(), status)
            return status

    def _problems(self) -> list[str]:
        self.table.refresh()
        read = (self.table.generation, self.table.trained.rows)
        if self._invalid is None or self._invalid[0] != read:
            rows = self.table.rows(0, CHECKED)
            found = problems(rows, dropped_rollouts(self.run.latest()), self.run.recipe().batch_size)
            self._invalid = (read, found)
        return self._invalid[1]

    @_reading
    def metrics(self) -> MetricTable:
        """Return the metrics with all rows that are on disk. Raises RunError."""
        self.table.refresh()
        return self.table

    @_reading
    def fleet(self) -> dict[str, Any]:
        """Return the nodes with their processes, and the replicas. Raises RunError."""
        status = self.status(processes=True)
        attempt = self.run.latest()
        outline = read_outline(attempt)
        names = {agent.name: index for index, agent in attempt.assignment().agents.items()}
        nodes: dict[str, dict[str, Any]] = {}
        for process in status["processes"]:
            name = process["node"]
            index = names.get(name)
            role = outline.nodes[index].role if index is not None and index < len(outline.nodes) else ""
            nodes.setdefault(name, {"name": name, "index": index, "role": role, "processes": []})
            nodes[name]["processes"].append(process)
        fields = ("phase", "roles", "replicas", "excluded", "silence")
        return {"nodes": list(nodes.values()), **{name: status[name] for name in fields}}

    @_reading
    def attempts(self) -> list[dict[str, Any]]:
        """Return the attempts with their events. Raises RunError."""
        return self.events.attempts()

    def attempt(self, number: int | None) -> Attempt:
        """Return an attempt by number; None: the newest. Raises RunError."""
        if number is None:
            return self.run.latest()
        for attempt in self.run.attempts():
            if attempt.number == number:
                return attempt
        raise RunError(f"{self.run.name} has no attempt {number}")

    @_reading
    def log_files(self, number: int | None) -> dict[str, Path]:
        """Return the logs of an attempt by name; None: of the newest attempt. Raises RunError."""
        attempt = self.attempt(number)
        job = attempt.job()
        output = self.run.job_output(job.job_id) if job and job.job_id else None
        return log_files(attempt, output)

    @_reading
    def plan(self) -> dict[str, Any]:
        """Return the plan of the newest attempt, without the details of processes. Raises RunError."""
        plan = self._plan()
        keep = ("name", "role", "replica", "gpus", "ports", "restart")
        for node in plan["nodes"]:
            node["processes"] = [{name: each.get(name) for name in keep} for each in node["processes"]]
        return {**plan, "lock": msgspec.to_builtins(self.run.lock())}

    @_reading
    def process(self, name: str) -> dict[str, Any]:
        """Return the full plan of one process. Raises RunError."""
        for node in self._plan()["nodes"]:
            for process in node["processes"]:
                if process.get("name") == name:
                    return dict(process)
        raise RunError(f"{self.run.name} has no process {name}")

    def _plan(self) -> dict[str, Any]:
        return plain(files.read_bytes(self.run.latest().plan_file))

    @_reading
    def recipe(self) -> dict[str, Any]:
        """Return the recipe as written and as resolved."""
        try:
            written = files.read_bytes(self.run.path / "recipe.yaml").decode(errors="replace")
        except OSError:
            written = ""
        return {"written": written, "resolved": self._resolved()}

    def _resolved(self) -> Mapping[str, Any]:
        recipe = files.read_json(self.run.path / resolved_recipe.FILE)
        return recipe if isinstance(recipe, dict) else {}

    @_reading
    def difference(self, other: RunData) -> list[Any]:
        """Return how the recipe of another run differs from this one's."""
        recipes = self._resolved(), other._resolved()
        return msgspec.to_builtins(recipe_diff(*recipes)) if all(recipes) else []

    @_reading
    def evaluations(self) -> dict[str, Any]:
        """Return the complete evaluations, and the best one by the recipe's metric. Raises RunError."""
        records = evaluations(self.run.path)
        recipe = self.run.recipe()
        keep_best = recipe.evaluation.keep_best if recipe.evaluation else None
        best = best_of(records, keep_best) if keep_best else None
        return {
            "evaluations": msgspec.to_builtins(records, str_keys=True),
            "best": msgspec.to_builtins(best),
        }

    @_reading
    def evaluated_examples(self, step: int, label: str) -> list[Any]:
        """Return the examples of an evaluation with their samples. Raises RunError."""
        directory = step_dir(self.run.path, step)
        for path in files.listing(directory, "*.jsonl"):
            if path.stem == label and files.exists(directory / SUMMARY):
                lines = files.read_bytes(path).split(b"\n")
                return [example for line in lines if (example := _json_object(line)) is not None]
        raise RunError(f"{self.run.name} has no evaluation of {label} at step {step}")


class RunIndex:
    """All runs of a directory."""

    def __init__(self, root: Path, states: JobStates, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self._states, self._clock = states, clock
        self._lock = threading.RLock()
        self._runs: dict[str, RunData] = {}
        self._overviews: tuple[float, list[RunOverview]] | None = None
        self._open: OrderedDict[str, None] = OrderedDict()

    def overviews(self) -> list[RunOverview]:
        """Return all runs, newest first. Raises OSError."""
        with self._lock:
            if self._overviews is None or self._clock() - self._overviews[0] > LIST_FRESH_S:
                self._list()
                found = sorted((run.overview() for run in self._runs.values()), key=lambda each: -each.created_at)
                self._overviews = (self._clock(), found)
            return self._overviews[1]

    def run(self, name: str) -> RunData:
        """Return a run by name. Raises RunError."""
        # The name comes from a URL. It is only compared with names in the directory, and never part of a path.
        with self._lock:
            known = self._runs.get(name)
            if known is None or known.identity != _identity(known.run):
                self._list()
            if name not in self._runs:
                raise RunError(f"there is no run {name}")
            self._open[name] = None
            self._open.move_to_end(name)
            while len(self._open) > OPEN_RUNS:
                oldest, _ = self._open.popitem(last=False)
                if oldest in self._runs:
                    self._runs[oldest].forget()
            return self._runs[name]

    def _list(self) -> None:
        paths = [path for path in files.listing(self.root) if not path.name.startswith(".")]
        names = {encodable(path.name): path for path in paths}
        before, self._runs = self._runs, {}
        for name, path in names.items():
            identity = _identity(run := RunDirectory(path))
            if identity is not None:
                known = before.get(name)
                if known is None or known.identity != identity:
                    known = RunData(run, self._states, self._clock)
                self._runs[name] = known


def _identity(run: RunDirectory) -> tuple[int, int] | None:
    """Return what differs between two runs that had the same name one after the other; None if there is no run."""
    about = files.status(run.path / "lock.json") if run.exists() else None
    return (about.st_ino, about.st_mtime_ns) if about else None


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _damaged(run: RunDirectory, error: Exception) -> RunOverview:
    problem = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
    return RunOverview(
        run=run.name,
        task="",
        created_at=0.0,
        attempt=0,
        job_id=None,
        phase="damaged",
        reason=problem,
        step=None,
        max_steps=0,
        health="error",
        problem=problem,
    )
