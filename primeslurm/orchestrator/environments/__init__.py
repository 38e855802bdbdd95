"""Environments by name: the bundled ones first, then any installed verifiers environment."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import random
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import env_config_type, load_environment, taskset_class

from primeslurm.errors import UsageError, Violation

BUNDLED = ("reverse-text",)
ENV_KEY = "env"
"""Key of an environment's args that holds options of the verifiers Env itself (agents, harness, runtime, timeouts)."""


def load(name: str, args: Mapping[str, Any]) -> vf.Env:
    """A verifiers Env. `args` are the taskset's options; `args["env"]` those of the Env around it.

    Raises:
        UsageError: there is no such environment, or it does not take these arguments.
    """
    _provide_bundled(name)
    options = {key: value for key, value in args.items() if key != ENV_KEY}
    try:
        taskset_class(name)
        kind = env_config_type(name, "")
        config = dict(args.get(ENV_KEY, {}))
        roles = {role: _local(config.get(role)) for role in agent_config_fields(kind())}
        return load_environment(kind.model_validate({**config, **roles, "taskset": {"id": name, **options}}))
    except ModuleNotFoundError as error:
        raise UsageError([Violation("environments.id", name, "no such environment", _suggestion(name))]) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError([Violation("environments.args", name, str(error))]) from error


class TaskStream:
    """The tasks of a taskset as an endless stream with random access.

    The first epoch has the taskset's own order; each further one an order of its own, fixed by the seed.
    """

    def __init__(self, taskset: vf.Taskset, seed: int) -> None:
        self._seed = seed
        self._source: Iterator[vf.Task] = iter(taskset)
        self._tasks: list[vf.Task] = []
        self._order: tuple[int, list[int]] | None = None

    def __getitem__(self, position: int) -> vf.Task:
        self._read(position + 1)
        if position < len(self._tasks):
            return self._tasks[position]
        epoch, offset = divmod(position, len(self._tasks))
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._tasks[self._order[1][offset]]

    def count(self, most: int) -> int:
        """Count the tasks of the first epoch, up to `most`."""
        self._read(most)
        return min(most, len(self._tasks))

    def _read(self, count: int) -> None:
        while len(self._tasks) < count and (task := next(self._source, None)) is not None:
            self._tasks.append(task)
        if not self._tasks:
            raise ValueError("the environment has no tasks")


def _provide_bundled(name: str) -> None:
    """Make a bundled taskset importable by its bare module name, as verifiers asks for it."""
    if name in BUNDLED:
        module = name.replace("-", "_")
        sys.modules[module] = importlib.import_module(f"{__name__}.{module}")


def _local(role: Mapping[str, Any] | None) -> dict[str, Any]:
    """An agent runs on this machine unless its options say otherwise."""
    return {"runtime": {"type": "subprocess"}, **(role or {})}


def _suggestion(name: str) -> str:
    installed = chain(BUNDLED, (dist.replace("_", "-") for dist in importlib.metadata.packages_distributions()))
    close = difflib.get_close_matches(name, list(installed), n=1)
    return f"did you mean {close[0]}?" if close else f"bundled: {', '.join(BUNDLED)}; others must be installed"
