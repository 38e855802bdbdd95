"""Do environments load here, and can the model be shown their tools? `python -m ...orchestrator.environments.probe`.

It reads `{"environments": [{...}, ...], "model": {...}}` from standard input, as in a recipe, and answers with one line
of JSON on standard output, a `Verdict` for each environment, and last one for the model. An environment's code may do
anything, hang and end the interpreter among it: each is tried in a process of its own, forked once verifiers is
imported, which takes seconds. It is what a worker does before its first rollout, as far as no engine is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any

from primeslurm.errors import UsageError, Violation
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import agents, host_needs, mistakes, pairing
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.trainer import Model

MODEL_S = 120.0
"""Longest look at a model's tokenizer, from however slow a file system."""
_KILL_S = 5.0
"""After its time is up, a process ends by itself, unless it cannot."""
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_TAIL = 20_000


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of one environment, or of the model."""

    answer: dict[str, Any] | None
    """See `probe` and `look_at`; None if its process did not get so far."""
    code: int
    """Exit code of its process; negative: by that signal."""
    stderr: str


@dataclasses.dataclass(frozen=True)
class _Child:
    pid: int
    ends_at: float
    answer: IO[str]
    stderr: IO[str]


def main() -> None:
    """Answer."""
    _end_with_parent()
    asked = json.load(sys.stdin)
    found = [Environment.model_validate(each) for each in asked["environments"]]
    model = Model.model_validate(asked["model"])
    environments.load("reverse-text", {})  # imports what verifiers puts off
    children = [_fork(functools.partial(probe, each), each.load_timeout_s) for each in found]
    children.append(_fork(functools.partial(look_at, model), MODEL_S))
    print(json.dumps([dataclasses.asdict(_wait(child)) for child in children]))


def probe(environment: Environment) -> dict[str, Any]:
    """Load an environment and its first task.

    Returns:
        violations: what would go wrong anywhere; missing: what this host lacks; tools: which agents offer the model
        tools, see `pairing.tool_users`.
    """
    try:
        env = environments.load(environment.id, environment.args, agents.agent_options(environment))
        if next(iter(env.taskset), None) is None:
            text = f"{environment.id} has no tasks with these arguments"
            return {"violations": [Violation("environments.args", "", text)]}
        return {
            "violations": pairing.contradictions(environment, env),
            "missing": host_needs.unmet(environment, env),
            "tools": pairing.tool_users(environment, env),
        }
    except UsageError as error:
        return {"violations": error.violations}
    except BaseException as error:  # it may raise anything, SystemExit too
        why = f"its first task cannot be read: {mistakes.raised(error, environment.id)}"
        return {"violations": [Violation("environments.id", environment.id, why)]}


def look_at(model: Model) -> dict[str, Any]:
    """Choose a model's renderer, as workers do.

    Returns:
        violations: why none can be; no_tools: why it cannot render tools.
    """
    from primeslurm.orchestrator.rendering import choosing

    if choosing.model_type_of(model.path) is None:  # it is not here, or is no model: others tell
        return {}
    try:
        chosen = choosing.choose(model.path, model.renderer, model.renderer_options, model.vlm is not None)
        return {"no_tools": chosen.no_tools}
    except choosing.RenderingError as error:
        return {"violations": [Violation("model.renderer", model.renderer, str(error))]}


def _fork(work: Callable[[], dict[str, Any]], limit_s: float) -> _Child:
    answer = tempfile.TemporaryFile("w+")  # noqa: SIM115  (both outlive this call)
    stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    if pid := os.fork():
        return _Child(pid, time.monotonic() + limit_s + _KILL_S, answer, stderr)
    try:
        _end_with_parent()
        os.setsid()
        os.dup2(stderr.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        json.dump(work(), answer, default=dataclasses.asdict)
        answer.flush()
        os._exit(0)  # without waiting for threads that the environment has left
    finally:
        os._exit(1)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(child: _Child) -> Verdict:
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
    return Verdict(json.loads(answer) if code == 0 and answer else None, code, child.stderr.read()[-_TAIL:])


if __name__ == "__main__":
    main()
