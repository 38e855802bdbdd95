"""Try to load environments, and choose the model's renderer: `python -m primeslurm.orchestrator.environments.probe`.

The command reads a `ProbeRequest` from stdin and prints `ProbeResults`. It does what a worker does before its first
rollout, except for what needs an engine. Code of an environment may hang or exit, so each environment is tried in a
process of its own. These are forked after the import of verifiers, which takes seconds.
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
from typing import IO, Any, Generic, TypeVar

import msgspec
import verifiers.v1 as vf

from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.imports import uncollected
from primeslurm.base.model_files import model_directory
from primeslurm.base.parent_death import end_with_parent
from primeslurm.base.paths import is_file
from primeslurm.base.units import count
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import checks, load_errors
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

T = TypeVar("T", bound=msgspec.Struct)
# Most tasks of a local file that are read.
MAX_TASKS = 10_000
READ_TIMEOUT_S = 20.0
# Longest time to read a model's tokenizer, even from a slow file system.
MODEL_TIMEOUT_S = 120.0
# After its timeout, a process normally ends itself. If it does not, it is killed this much later.
_KILL_AFTER_S = 5.0
_POLL_INTERVAL_S = 0.02
_STDERR_CHARS = 20_000


@dataclasses.dataclass(frozen=True)
class _Child(Generic[T]):
    kind: type[T]
    pid: int
    deadline: float
    answer: IO[str]
    stderr: IO[str]


def main() -> None:
    end_with_parent()
    request = decoded(sys.stdin.read(), ProbeRequest)
    recipe_environments = [Environment.model_validate(each) for each in request.environments]
    model = Model.model_validate(request.model)
    with uncollected():
        environments.load("reverse-text", {})  # imports the modules that verifiers loads late
    children = [
        _fork(EnvironmentAnswer, functools.partial(probe, each, model, request.max_len), each.load_timeout_s)
        for each in recipe_environments
    ]
    model_child = _fork(ModelAnswer, functools.partial(_probe_model_without_torch, model), MODEL_TIMEOUT_S)
    print(encoded(ProbeResults([_wait(child) for child in children], _wait(model_child))))


def probe(environment: Environment, model: Model | None = None, max_len: int | None = None) -> EnvironmentAnswer:
    """Load an environment and its first task, and read its other tasks if they are in a local file."""
    prompts = _Prompts(model, max_len)
    try:
        env = environments.load_from_recipe(environment)
        tasks = iter(env.taskset)
        task = next(tasks, None)
        if task is None:
            text = f"{environment.id} has no tasks with these arguments"
            return EnvironmentAnswer([Violation("environments.args", "", text)])
        prompts.add(task)
        number, unreadable = _read_local_file(environment, tasks, prompts)
        without_reward = checks.without_reward(environment, env, task)
        return EnvironmentAnswer(
            violations=[*checks.contradictions(environment, env), *unreadable],
            missing=checks.missing_needs(environment, env),
            warnings=prompts.warnings(environment),
            notes=[*checks.side_effects(environment, env), *without_reward],
            tools=checks.tool_users(environment, env),
            tasks=number,
        )
    except UsageError as error:
        return EnvironmentAnswer(list(error.violations))
    except BaseException as error:  # an environment may raise anything, even SystemExit
        why = f"its first task cannot be read: {load_errors.describe(error, environment.id)}"
        return EnvironmentAnswer([Violation("environments.id", environment.id, why)])


class _Prompts:
    """Prompts that leave no room for an answer. Only their text is counted, not what the renderer adds."""

    def __init__(self, model: Model | None, max_len: int | None) -> None:
        self._max_len = max_len
        directory = model_directory(model.path) if model is not None else None
        self._file = directory / "tokenizer.json" if directory is not None else None
        self._number = 0
        self._too_long: list[tuple[int, int]] = []  # number of the task, and its tokens

    def add(self, task: vf.Task) -> None:
        self._number += 1
        prompt, system = task.data.prompt, task.data.system_prompt or ""
        texts = [prompt] if isinstance(prompt, str) else [_text_of(message) for message in prompt or ()]
        text = "\n".join([system, *texts])
        # A token has at least one byte, so most prompts need no tokenizer.
        if self._max_len is None or len(text.encode(errors="replace")) < self._max_len or self._tokenizer is None:
            return
        tokens = len(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if tokens >= self._max_len:
            self._too_long.append((self._number, tokens))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer  # without transformers, whose import takes seconds

        with contextlib.suppress(Exception):  # other checks report a tokenizer that does not load
            return Tokenizer.from_file(str(self._file)) if self._file is not None and is_file(self._file) else None
        return None

    def warnings(self, environment: Environment) -> list[Violation]:
        if not self._too_long:
            return []
        first, tokens = self._too_long[0]
        prompts = f"{len(self._too_long)} of {count(self._number, 'prompt')}"
        why = f"{prompts} leave no room for an answer: the prompt of task {first} has {tokens:,} tokens"
        fix = f"remove them, or raise seq_len (engines take at most {self._max_len:,} tokens)"
        return [Violation("environments.id", environment.id, why, fix)]


def _text_of(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else getattr(message, "content", "")
    return content if isinstance(content, str) else ""


def _read_local_file(
    environment: Environment, tasks: Iterator[vf.Task], prompts: _Prompts
) -> tuple[int | None, list[Violation]]:
    # A bad line would otherwise end rollouts after hours of training. Tasks from elsewhere are not read, because an
    # environment may download or generate each of them.
    path = environment.args.get("path")
    if not isinstance(path, str) or not is_file(Path(path)):
        return None, []
    deadline = time.monotonic() + min(READ_TIMEOUT_S, environment.load_timeout_s / 2)
    number = 1
    while number < MAX_TASKS and time.monotonic() < deadline:
        try:
            if (task := next(tasks, None)) is None:
                return number, []
            prompts.add(task)
        except Exception as error:
            why = f"task {number + 1} cannot be read: {load_errors.describe(error, environment.id)}"
            return None, [Violation("environments.args.path", path, why, "correct the file, or remove the line")]
        number += 1
    return None, []


def probe_model(model: Model) -> ModelAnswer:
    """Choose a model's renderer, as workers do."""
    from primeslurm.orchestrator.rendering import renderer_selection

    if renderer_selection.model_type_of(model.path) is None:  # other checks report a missing or invalid model
        return ModelAnswer()
    try:
        chosen = renderer_selection.select_renderer(
            model.path, model.renderer, model.renderer_options, model.vlm is not None
        )
        return ModelAnswer(no_tools=chosen.no_tools)
    except renderer_selection.RenderingError as error:
        return ModelAnswer([Violation("model.renderer", model.renderer, str(error))])


def _probe_model_without_torch(model: Model) -> ModelAnswer:
    # Tokenizers do not need torch, and its import takes longer than everything else together. With this entry,
    # transformers does not find it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    return probe_model(model)


def _fork(kind: type[T], work: Callable[[], T], timeout_s: float) -> _Child[T]:
    answer = tempfile.TemporaryFile("w+")  # noqa: SIM115  (both outlive this call)
    stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    if pid := os.fork():
        return _Child(kind, pid, time.monotonic() + timeout_s + _KILL_AFTER_S, answer, stderr)
    try:
        end_with_parent()
        os.setsid()  # so that the parent can kill the process with everything that it has started
        # Prints of the environment must not mix with the results on stdout.
        os.dup2(stderr.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        # The traceback shows the user where a slow environment hangs.
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        answer.write(encoded(work()))
        answer.flush()
        os._exit(0)  # does not wait for threads that the environment has started
    finally:
        os._exit(1)


def _wait(child: _Child[T]) -> ProbeResult[T]:
    """Wait until a process ends, and kill the processes that it has started."""
    ended_pid, status = 0, 0
    while not ended_pid and time.monotonic() < child.deadline:
        ended_pid, status = os.waitpid(child.pid, os.WNOHANG)
        time.sleep(_POLL_INTERVAL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if not ended_pid:
        _, status = os.waitpid(child.pid, 0)
    for file in (child.answer, child.stderr):
        file.seek(0)
    text, code = child.answer.read(), os.waitstatus_to_exitcode(status)
    answer = decoded(text, child.kind) if code == 0 and text else None
    return ProbeResult(answer, code, child.stderr.read()[-_STDERR_CHARS:])


if __name__ == "__main__":
    main()
