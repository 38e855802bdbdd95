"""Do environments load here, and can the model be shown their tools? `python -m ...orchestrator.environments.probe`.

It reads a `ProbeRequest` from standard input and answers with `ProbeResults` on standard output. An environment's code
may do anything, hang and end the interpreter among it: each is tried in a process of its own, forked once verifiers is
imported, which takes seconds. It is what a worker does before its first rollout, as far as no engine is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Generic, TypeVar

import msgspec
import verifiers.v1 as vf

from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.imports import uncollected
from primeslurm.base.parent_death import end_with_parent
from primeslurm.base.paths import is_file
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.trainer import Model
from primeslurm.wire.probe_messages import (
    EnvironmentAnswer,
    ModelAnswer,
    ProbeRequest,
    ProbeResult,
    ProbeResults,
    decoded,
    encoded,
)

with uncollected():
    from primeslurm.orchestrator import environments
    from primeslurm.orchestrator.environments import agents, harness_compatibility, host_needs

T = TypeVar("T", bound=msgspec.Struct)
MOST_TASKS = 10_000
"""Tasks of a local file that are read."""
READING_S = 20.0
"""Longest time to read them."""
MODEL_S = 120.0
"""Longest look at a model's tokenizer, from however slow a file system."""
_KILL_S = 5.0
"""After its time is up, a process ends by itself, unless it cannot."""
_POLL_S = 0.02
_TAIL = 20_000


@dataclasses.dataclass(frozen=True)
class _Child(Generic[T]):
    kind: type[T]
    pid: int
    ends_at: float
    answer: IO[str]
    stderr: IO[str]


def main() -> None:
    """Answer."""
    end_with_parent()
    asked = decoded(sys.stdin.read(), ProbeRequest)
    found = [Environment.model_validate(each) for each in asked.environments]
    model = Model.model_validate(asked.model)
    with uncollected():
        environments.load("reverse-text", {})  # imports what verifiers puts off
    tried = [_fork(EnvironmentAnswer, functools.partial(probe, each), each.load_timeout_s) for each in found]
    looking = _fork(ModelAnswer, functools.partial(_look_without_torch, model), MODEL_S)
    print(encoded(ProbeResults([_wait(child) for child in tried], _wait(looking))))


def probe(environment: Environment) -> EnvironmentAnswer:
    """Load an environment and its first task."""
    try:
        env = environments.load(environment.id, environment.args, agents.agent_options(environment))
        source = iter(env.taskset)
        task = next(source, None)
        if task is None:
            text = f"{environment.id} has no tasks with these arguments"
            return EnvironmentAnswer([Violation("environments.args", "", text)])
        tasks, unreadable = _read_file(environment, source)
        return EnvironmentAnswer(
            violations=[*harness_compatibility.contradictions(environment, env), *unreadable],
            missing=host_needs.unmet(environment, env),
            notes=[*host_needs.notes(environment, env), *harness_compatibility.unrewarded(environment, env, task)],
            tools=harness_compatibility.tool_users(environment, env),
            tasks=tasks,
        )
    except UsageError as error:
        return EnvironmentAnswer(list(error.violations))
    except BaseException as error:  # it may raise anything, SystemExit too
        why = f"its first task cannot be read: {mistakes.raised(error, environment.id)}"
        return EnvironmentAnswer([Violation("environments.id", environment.id, why)])


def _read_file(environment: Environment, rest: Iterator[vf.Task]) -> tuple[int | None, list[Violation]]:
    """Read the tasks after the first one, if they come from a local file.

    A faulty line would otherwise end rollouts after hours of training. Tasks from elsewhere are not read, because an
    environment may download or generate each of them.

    Returns:
        The number of tasks in the file, None if not all were read; and why one of them cannot be read.
    """
    path = environment.args.get("path")
    if not isinstance(path, str) or not is_file(Path(path)):
        return None, []
    ends_at = time.monotonic() + min(READING_S, environment.load_timeout_s / 2)
    number = 1
    while number < MOST_TASKS and time.monotonic() < ends_at:
        try:
            if next(rest, None) is None:
                return number, []
        except Exception as error:  # it may raise anything
            why = f"task {number + 1} cannot be read: {mistakes.raised(error, environment.id)}"
            return None, [Violation("environments.args.path", path, why, "correct the file, or remove the line")]
        number += 1
    return None, []


def look_at(model: Model) -> ModelAnswer:
    """Choose a model's renderer, as workers do."""
    from primeslurm.orchestrator.rendering import renderer_selection

    if renderer_selection.model_type_of(model.path) is None:  # it is not here, or is no model: others tell
        return ModelAnswer()
    try:
        chosen = renderer_selection.select_renderer(
            model.path, model.renderer, model.renderer_options, model.vlm is not None
        )
        return ModelAnswer(no_tools=chosen.no_tools)
    except renderer_selection.RenderingError as error:
        return ModelAnswer([Violation("model.renderer", model.renderer, str(error))])


def _look_without_torch(model: Model) -> ModelAnswer:
    """Look at a model in a process of its own: tokenizers need no torch, importing which takes longer than all else."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # so that transformers does not find it
    return look_at(model)


def _fork(kind: type[T], work: Callable[[], T], limit_s: float) -> _Child[T]:
    answer = tempfile.TemporaryFile("w+")  # noqa: SIM115  (both outlive this call)
    stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    if pid := os.fork():
        return _Child(kind, pid, time.monotonic() + limit_s + _KILL_S, answer, stderr)
    try:
        end_with_parent()
        os.setsid()
        os.dup2(stderr.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        answer.write(encoded(work()))
        answer.flush()
        os._exit(0)  # without waiting for threads that the environment has left
    finally:
        os._exit(1)


def _wait(child: _Child[T]) -> ProbeResult[T]:
    """Wait for the end of a process, and end what it has started."""
    done, status = 0, 0
    while not done and time.monotonic() < child.ends_at:
        done, status = os.waitpid(child.pid, os.WNOHANG)
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if not done:
        _, status = os.waitpid(child.pid, 0)
    for file in (child.answer, child.stderr):
        file.seek(0)
    answer, code = child.answer.read(), os.waitstatus_to_exitcode(status)
    found = decoded(answer, child.kind) if code == 0 and answer else None
    return ProbeResult(found, code, child.stderr.read()[-_TAIL:])


if __name__ == "__main__":
    main()
