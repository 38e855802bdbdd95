"""Environments by name: the bundled ones first, then any installed verifiers environment."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import env_config_type, load_environment, taskset_config_type

from primeslurm.base.errors import UsageError, Violation
from primeslurm.orchestrator.environments import agents, load_errors
from primeslurm.orchestrator.task_order import ENDLESS_WINDOW, WINDOW, first_epoch, later_epoch
from primeslurm.recipe.sandbox_rules import ENV_KEY
from primeslurm.wire.probe_messages import UNKNOWN

BUNDLED = ("arithmetic", "harbor-local", "math-problems", "reverse-text", "tool-use")
HARNESSES = ("chat", "shell")
"""Harnesses of our own, whose loop runs in the worker: `harness: {id: chat}` takes one for any taskset."""


def load(name: str, args: Mapping[str, Any], agent: Mapping[str, Any] = {}) -> vf.Env:
    """A verifiers Env. `args` are the taskset's options; `args["env"]` those of the Env around it.

    `agent` is what the recipe says of each agent that these options do not (`agents.agent_options`).

    Raises:
        UsageError: there is no such environment, or it does not take these arguments.
    """
    _provide_bundled(name)
    options = {key: value for key, value in args.items() if key != ENV_KEY}
    try:
        taskset = taskset_config_type(name)
        kind = env_config_type(name, "")
        config = dict(args.get(ENV_KEY, {}))
        roles = {role: agents.completed(config.get(role) or {}, agent, name) for role in agent_config_fields(kind())}
        env = load_environment(kind.model_validate({**config, **roles, "taskset": {"id": name, **options}}))
    except ModuleNotFoundError as error:
        known = (
            load_errors.outdated(error, name)
            or load_errors.absent_part(error)
            or load_errors.absent_module(error, name)
        )
        missing = known or Violation("environments.id", name, UNKNOWN, _suggestion(name))
        raise UsageError([missing]) from error
    except ValidationError as error:
        raise UsageError(load_errors.invalid(error, kind, taskset, config)) from error
    except (Exception, SystemExit) as error:  # an environment may raise anything, and scripts end their process
        known = load_errors.outdated(error, name)
        raise UsageError([known or Violation("environments.id", name, load_errors.raised(error, name))]) from error
    if unbound := load_errors.unbound_toolsets(env):
        raise UsageError([Violation("environments.id", *unbound)])
    return env


class TaskStream:
    """The tasks of a taskset: by index, and as an endless stream with random access.

    Each epoch of the stream has an order of its own, fixed by the seed.

    Args:
        taskset: read no further than is asked for.
        seed: of the run.
        shuffle: the first epoch, too; else it has the taskset's own order. A taskset that declares itself endless is
            shuffled in small windows, any other one in windows of so many tasks that few have more.
    """

    def __init__(self, taskset: vf.Taskset, seed: int, shuffle: bool) -> None:
        self._seed = seed
        self._window = (WINDOW if taskset.bounded else ENDLESS_WINDOW) if shuffle else 1
        self._taskset = taskset
        self._source: Iterator[vf.Task] | None = None
        self._tasks: list[vf.Task] = []
        self._ended = False

    def __getitem__(self, position: int) -> vf.Task:
        self._read((position // self._window + 1) * self._window)
        known = len(self._tasks)
        if position < known:
            return self._tasks[first_epoch(position, self._seed, self._window, known if self._ended else None)]
        epoch, offset = divmod(position, known)
        return self._tasks[later_epoch(epoch, offset, self._seed, known)]

    def task(self, index: int) -> vf.Task:
        """Return the task at an index of the taskset. Raises IndexError if there is none."""
        self._read(index + 1)
        return self._tasks[index]

    def count(self, most: int | None = None) -> int:
        """Count the tasks of a taskset that ends, or those of any taskset up to `most`."""
        while not self._ended and (most is None or len(self._tasks) < most):
            self._read(most or len(self._tasks) + WINDOW)
        return len(self._tasks) if most is None else min(most, len(self._tasks))

    def _read(self, count: int) -> None:
        while len(self._tasks) < count and not self._ended:
            try:
                self._source = self._source or islice(iter(self._taskset), len(self._tasks), None)
                task = next(self._source, None)
            except BaseException:
                # A generator that has raised only stops from then on, as if there were no more tasks. This worker would
                # then give other tasks to the same positions than other workers.
                self._source = None
                raise
            if task is None:
                self._ended = True
            else:
                self._tasks.append(task)
        if not self._tasks:
            raise ValueError("the environment has no tasks")


def _provide_bundled(name: str) -> None:
    """Make harnesses and a bundled taskset importable by their bare module names, as verifiers asks for them."""
    for bundled in (*HARNESSES, *((name,) if name in BUNDLED else ())):
        module = bundled.replace("-", "_")
        sys.modules[module] = importlib.import_module(f"{__name__}.{module}")


def _suggestion(name: str) -> str:
    installed = chain(BUNDLED, (dist.replace("_", "-") for dist in importlib.metadata.packages_distributions()))
    close = difflib.get_close_matches(name, list(installed), n=1)
    return f"did you mean {close[0]}?" if close else f"bundled: {', '.join(BUNDLED)}; others must be installed"
