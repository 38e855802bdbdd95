"""Load environments by name: bundled ones, and every installed verifiers environment."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from primeslurm.base.imports import uncollected

# First, because modules of this package also import verifiers, and so that a Python without it is recognised.
with uncollected():
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        env_config_type,
        harness_class,
        harness_config_type,
        load_environment,
        taskset_config_type,
    )

from pydantic import ValidationError

from primeslurm.base.errors import UsageError, Violation
from primeslurm.orchestrator.environments import load_errors
from primeslurm.orchestrator.task_order import ENDLESS_WINDOW, WINDOW, first_epoch, later_epoch
from primeslurm.recipe.rules.sandboxes import (
    ENV_KEY,
    HARNESSES,
    WITHOUT_CONTAINER,
    WITHOUT_INSTALLING,
    module_name,
)
from primeslurm.recipe.sections.orchestrator import AnyEnvironment
from primeslurm.recipe.sections.sandboxes import (
    STAGES,
    ApptainerRuntime,
    ContainerRuntime,
    HostedRuntime,
    Limits,
    Runtime,
)

BUNDLED = ("arithmetic", "harbor-local", "math-problems", "reverse-text", "tool-use")
# Harnesses whose loop runs in the worker. A recipe selects one with `harness: {id: chat}`.
BUNDLED_HARNESSES = ("chat", "shell")


def load_from_recipe(environment: AnyEnvironment) -> vf.Env:
    """Load an environment with the arguments, harness and runtime of a recipe. Raises UsageError."""
    return load(environment.id, environment.args, agent_options(environment))


def load(name: str, args: Mapping[str, Any], agent: Mapping[str, Any] = {}) -> vf.Env:
    """Load an environment.

    Args:
        name: id of the taskset, bundled or of an installed package.
        args: options of the taskset. `args["env"]` are options of the verifiers Env around it.
        agent: options of every agent (see `agent_options`). Options of an agent in `args["env"]` take precedence.

    Raises:
        UsageError: there is no such environment, or it does not accept these arguments.
    """
    _register_bundled(name)
    options = {key: value for key, value in args.items() if key != ENV_KEY}
    try:
        taskset = taskset_config_type(name)
        kind = env_config_type(name, "")
        config = dict(args.get(ENV_KEY, {}))
        roles = {role: _complete(config.get(role) or {}, agent, name) for role in agent_config_fields(kind())}
        env = load_environment(kind.model_validate({**config, **roles, "taskset": {"id": name, **options}}))
    except ValidationError as error:
        raise UsageError(load_errors.invalid_options(error, kind, taskset, config)) from error
    except (Exception, SystemExit) as error:  # an environment may raise anything, and may be a script that exits
        failure = load_errors.load_failure(error, name, BUNDLED)
        raise UsageError([failure, *_wrong_options(name, options, agent, failure)]) from error
    if unbound := load_errors.unbound_toolsets(env):
        raise UsageError([unbound])
    return env


def _wrong_options(
    name: str, options: Mapping[str, Any], agent: Mapping[str, Any], failure: Violation
) -> list[Violation]:
    """Check options that an environment with an unknown harness would take, so that one error does not hide others."""
    if failure.field != load_errors.HARNESS:
        return []
    problems = load_errors.invalid_part(taskset_config_type(name), {"id": name, **options}, "environments.args")
    with contextlib.suppress(AttributeError, TypeError):  # a module beside the harnesses of verifiers may be none
        if nearest := load_errors.nearest_harness(failure.value):
            harness = {**agent.get("harness", {}), "id": nearest}
            problems += load_errors.invalid_part(harness_config_type(nearest), harness, "environments.harness")
    return problems


def _register_bundled(name: str) -> None:
    """Make harnesses and a bundled taskset importable by their bare module names, as verifiers requires."""
    for bundled in (*BUNDLED_HARNESSES, *((name,) if name in BUNDLED else ())):
        # A bundled taskset is only registered when it is used, so that it never shadows a user's module of that name.
        module = bundled.replace("-", "_")
        sys.modules[module] = importlib.import_module(f"{__name__}.{module}")


def agent_options(environment: AnyEnvironment) -> dict[str, Any]:
    """Convert a recipe's harness and runtime to verifiers' options of an agent."""
    options: dict[str, Any] = {}
    if environment.harness is not None:
        options["harness"] = environment.harness.options
    if (runtime := environment.runtime) is not None:
        options["timeout"] = dict.fromkeys(STAGES, runtime.limits.wall_time_s)
        options["runtime"] = _runtime_options(runtime)
        if runtime.secrets:
            options["secrets"] = list(runtime.secrets)
    return options


def _runtime_options(runtime: Runtime) -> dict[str, Any]:
    options: dict[str, Any] = {"type": runtime.type}
    if isinstance(runtime, ContainerRuntime):
        options |= {name: value for name in ("image", "workdir") if (value := getattr(runtime, name)) is not None}
        options |= _limit_options(runtime.limits)
    if isinstance(runtime, HostedRuntime):  # its other fields have verifiers' names
        options |= runtime.model_dump(mode="json", exclude=set(ContainerRuntime.model_fields))
    if isinstance(runtime, ApptainerRuntime):  # verifiers' apptainer has no `allow`; `containers` closes the network
        options.pop("allow", None)
    return options


def _limit_options(limits: Limits) -> dict[str, Any]:
    options: dict[str, Any] = {"cpu": limits.cpus, "memory": limits.memory_gb, "disk": limits.disk_gb}
    options = {name: value for name, value in options.items() if value is not None}
    if limits.network == "none":
        options["allow"] = []
    elif isinstance(limits.network, tuple):
        options["allow"] = list(limits.network)
    return options


def _complete(explicit: Mapping[str, Any], agent: Mapping[str, Any], taskset: str) -> dict[str, Any]:
    """Complete one agent's options in `args.env` with those of the recipe, and with defaults that fit the harness."""
    options = {**agent, **explicit}
    harness = {"id": default_harness_id(taskset), **(options.get("harness") or {})}
    if secrets := options.pop("secrets", None):
        options["harness"] = {**harness, "forward_env": secrets}
    name = module_name(harness["id"])
    needs_container = (
        name not in WITHOUT_CONTAINER if name in HARNESSES else bool(harness_class(harness["id"]).NEEDS_CONTAINER)
    )
    runtime = options.setdefault("runtime", {"type": "apptainer" if needs_container else "subprocess"})
    if needs_container and runtime.get("type") == "subprocess" and name in WITHOUT_INSTALLING:
        # verifiers demands a container so that programs and node do not see each other. Our sandboxes ensure that.
        harness_class(harness["id"]).NEEDS_CONTAINER = False
    return options


class TaskStream:
    """The tasks of a taskset, by index, and as an endless stream with random access.

    Each epoch of the stream has its own order, fixed by the seed.

    Args:
        taskset: read only as far as needed.
        seed: seed of the run, which all workers share.
        shuffle: whether the first epoch is shuffled, too. Endless tasksets are shuffled in small windows, others in
            windows that hold all tasks of nearly every taskset.
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
        count = len(self._tasks)
        if position < count:
            return self._tasks[first_epoch(position, self._seed, self._window, count if self._ended else None)]
        epoch, offset = divmod(position, count)
        return self._tasks[later_epoch(epoch, offset, self._seed, count)]

    def task(self, index: int) -> vf.Task:
        """Return the task at an index of the taskset. Raises IndexError if there is none."""
        self._read(index + 1)
        return self._tasks[index]

    def count(self, most: int | None = None) -> int:
        """Count the tasks, up to `most`. Without `most`, the taskset must be finite."""
        while not self._ended and (most is None or len(self._tasks) < most):
            self._read(most or len(self._tasks) + WINDOW)
        return len(self._tasks) if most is None else min(most, len(self._tasks))

    def _read(self, count: int) -> None:
        while len(self._tasks) < count and not self._ended:
            try:
                self._source = self._source or islice(iter(self._taskset), len(self._tasks), None)
                task = next(self._source, None)
            except BaseException:
                # A generator that has raised is exhausted, as if there were no more tasks. This worker would then give
                # other tasks to the same positions than other workers. So the next call starts a new iterator.
                self._source = None
                raise
            if task is None:
                self._ended = True
            else:
                self._tasks.append(task)
        if not self._tasks:
            raise ValueError("the environment has no tasks")
