"""Do environments load here? `python -m primeslurm.orchestrator.environments.probe`.

It reads `{"environments": [{...}, ...]}` from standard input, as in a recipe, and answers with one line of JSON on
standard output, a `Verdict` for each. An environment's code may do anything, hang and end the interpreter among it:
each is tried in a process of its own, forked once verifiers is imported, which takes seconds. It is what a worker does
before its first rollout, as far as no engine is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from primeslurm.errors import UsageError, Violation
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import agents, host_needs, mistakes, pairing
from primeslurm.recipe.sections.orchestrator import Environment

_KILL_S = 5.0
"""After its time is up, a process ends by itself, unless it cannot."""
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_TAIL = 20_000


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of one environment."""

    answer: dict[str, list[dict[str, str]]] | None
    """Violations by kind, see `probe`; None if its process did not get so far."""
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
    asked = [Environment.model_validate(each) for each in json.load(sys.stdin)["environments"]]
    environments.load("reverse-text", {})  # imports what verifiers puts off
    children = [_fork(environment) for environment in asked]
    print(json.dumps([dataclasses.asdict(_wait(child)) for child in children]))


def probe(environment: Environment) -> dict[str, Sequence[Violation]]:
    """Load an environment and its first task.

    Returns:
        violations: what would go wrong anywhere; missing: what this host lacks.
    """
    try:
        env = environments.load(environment.id, environment.args, agents.agent_options(environment))
        if next(iter(env.taskset), None) is None:
            text = f"{environment.id} has no tasks with these arguments"
            return {"violations": [Violation("environments.args", "", text)]}
        return {"violations": pairing.contradictions(environment, env), "missing": host_needs.unmet(environment, env)}
    except UsageError as error:
        return {"violations": error.violations}
    except BaseException as error:  # it may raise anything, SystemExit too
        why = f"its first task cannot be read: {mistakes.raised(error, environment.id)}"
        return {"violations": [Violation("environments.id", environment.id, why)]}


def _fork(environment: Environment) -> _Child:
    answer = tempfile.TemporaryFile("w+")  # noqa: SIM115  (both outlive this call)
    stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    if pid := os.fork():
        return _Child(pid, time.monotonic() + environment.load_timeout_s + _KILL_S, answer, stderr)
    try:
        _end_with_parent()
        os.setsid()
        os.dup2(stderr.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        faulthandler.dump_traceback_later(environment.load_timeout_s, exit=True)
        found = probe(environment)
        json.dump({kind: [dataclasses.asdict(each) for each in each_kind] for kind, each_kind in found.items()}, answer)
        answer.flush()
        os._exit(0)  # without waiting for threads that the environment has left
    finally:
        os._exit(1)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(child: _Child) -> Verdict:
    """Wait for the end of an environment's process, and end what it has started."""
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
