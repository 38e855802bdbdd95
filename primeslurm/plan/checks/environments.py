"""Check that a recipe's environments load, with the Python of jobs. Runs before a submission and on the nodes.

One process (`orchestrator.environments.probe`) loads all of them, as importing verifiers takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from primeslurm.base.errors import Violation
from primeslurm.base.units import count, duration
from primeslurm.models.renderers import AUTO
from primeslurm.plan.checks.tool_rendering import unrenderable
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment
from primeslurm.recipe.sections.orchestrator import AnyEnvironment
from primeslurm.recipe.sections.trainer import Model
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.probe_messages import (
    EnvironmentAnswer,
    ModelAnswer,
    ProbeRequest,
    ProbeResult,
    ProbeResults,
    decoded,
    encoded,
)

PROBE = "primeslurm.orchestrator.environments.probe"
# Environments that need only verifiers. If a recipe has no other, loading them is skipped.
_SURE = ("reverse-text",)
# Fields that determine how an environment loads
_LOADED = {"id", "args", "harness", "runtime", "load_timeout_s"}
# Fields that determine how messages are rendered
_RENDERED = {"path", "renderer", "renderer_options", "vlm"}
# Time to import Python and verifiers from a slow file system [s], in addition to an environment's own timeout
_IMPORT_S = 180.0
_UNPREPARED = re.compile(r"ModuleNotFoundError: No module named '(primeslurm|verifiers|transformers)\b")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')


def environments_by_field(
    environments: Iterable[AnyEnvironment], evaluated: Iterable[AnyEnvironment] = ()
) -> dict[str, AnyEnvironment]:
    """Return training and evaluation environments by their place in the recipe."""
    by_field = {f"environments.{i}": each for i, each in enumerate(environments)}
    return by_field | {f"evaluation.environments.{i}": each for i, each in enumerate(evaluated)}


@dataclass(frozen=True)
class Interpreter:
    """The Python that jobs use."""

    python: str
    env: Mapping[str, str]  # variables that override those of this process

    @property
    def here(self) -> bool:
        return shutil.which(self.python) is not None


@dataclass(frozen=True)
class ProbeReport:
    """Result of loading environments. Fields are those of the recipe, for example `environments.0.args.x`."""

    violations: tuple[Violation, ...] = ()  # problems on every host
    missing: tuple[Violation, ...] = ()  # requirements of runtimes that this host lacks
    notes: tuple[Violation, ...] = ()  # properties of rollouts that some users do not want
    warnings: tuple[Violation, ...] = ()  # too few tasks, or tasks that no rollout can do
    missing_package: str = ""  # package that the interpreter lacks, so that nothing could be loaded


def probe_environments(
    environments: Mapping[str, AnyEnvironment],
    model: Model,
    interpreter: Interpreter,
    tmp: Path | None = None,
    max_len: int | None = None,
) -> ProbeReport:
    """Load every environment that could fail and its first task, and check the model's renderer.

    Args:
        environments: environments by their place in the recipe.
        max_len: longest sequence of an engine [tokens], with which prompts in local files are compared.
    """
    plain = model.renderer == AUTO and not model.renderer_options
    wanted = {place: each for place, each in environments.items() if not (plain and _is_sure(each))}
    if not wanted:
        return ProbeReport()
    request = ProbeRequest(
        environments=[each.model_dump(mode="json", by_alias=True, include=_LOADED) for each in wanted.values()],
        model=model.model_dump(mode="json", include=_RENDERED),
        max_len=max_len,
    )
    limit_s = _IMPORT_S + max(each.load_timeout_s for each in wanted.values())
    code, out, err = run_module(interpreter, PROBE, encoded(request), limit_s, tmp)
    if code != 0:
        return _not_loaded(interpreter, code, err)
    try:
        results = decoded(out, ProbeResults)
    except DamagedError:
        return _not_loaded(interpreter, None, err)
    of_model = results.model.answer or ModelAnswer()  # of a tokenizer that does not load, engines tell
    pairs = zip(wanted.items(), results.environments, strict=True)
    reports = [_report_of(*each, result, of_model.no_tools) for each, result in pairs]
    return ProbeReport(
        (*of_model.violations, *(violation for tried in reports for violation in tried.violations)),
        tuple(violation for tried in reports for violation in tried.missing),
        tuple(violation for tried in reports for violation in tried.notes),
        tuple(violation for tried in reports for violation in tried.warnings),
    )


def _is_sure(environment: AnyEnvironment) -> bool:
    return environment.id in _SURE and not (environment.args or environment.harness or environment.runtime)


def run_module(
    interpreter: Interpreter, module: str, stdin: str, limit_s: float, tmp: Path | None = None
) -> tuple[int | None, str, str]:
    """Run a module with the Python of jobs in an empty directory, so that it imports no local file by accident.

    Its temporary files are there, too: environments are killed before they could remove theirs.

    Returns:
        Exit code (None if it was killed), standard output and standard error.
    """
    with tempfile.TemporaryDirectory(prefix="primeslurm-", dir=tmp, ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [interpreter.python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            cwd=directory,
            env={"HF_HUB_OFFLINE": "1", **os.environ, **interpreter.env, "TMPDIR": directory},
            start_new_session=True,
        )
        try:
            out, err = process.communicate(stdin, timeout=limit_s)
            return process.returncode, out, err
        except subprocess.TimeoutExpired:
            return None, "", ""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _not_loaded(interpreter: Interpreter, code: int | None, err: str) -> ProbeReport:
    lacks, how = exit_reason(code, err)
    if lacks:
        return ProbeReport(missing_package=lacks)
    return ProbeReport((Violation("environments", "", f"cannot be loaded: {interpreter.python} {how}"),))


def exit_reason(code: int | None, err: str) -> tuple[str, str]:
    """Return the package that the Python of jobs lacks ("" for none), and how its process ended."""
    last = (err.strip().splitlines() or ["no output"])[-1]
    lacks = _UNPREPARED.match(last)
    how = "does not answer" if code is None else f"ends with exit code {code}: {last[:300]}"
    return (lacks[1] if lacks else ""), how


def _report_of(
    place: str, environment: AnyEnvironment, result: ProbeResult[EnvironmentAnswer], no_tools: str
) -> ProbeReport:
    if (answer := result.answer) is not None:
        users = answer.tools if no_tools else ()
        unshown = (unrenderable(field, harness, no_tools) for field, harness in users)
        return ProbeReport(
            tuple(_placed(place, each) for each in (*answer.violations, *unshown)),
            tuple(_placed(place, each) for each in answer.missing),
            tuple(_placed(place, each) for each in answer.notes),
            tuple(_placed(place, each) for each in (*answer.warnings, *_too_few(environment, answer.tasks))),
        )
    why, fix = _no_answer(result.code, result.stderr, environment)
    return ProbeReport((_placed(place, Violation("environments.id", environment.id, why, fix)),))


def _too_few(environment: AnyEnvironment, tasks: int | None) -> list[Violation]:
    """Warn if an evaluation requests more examples than the file has. The default number is not a request."""
    if not isinstance(environment, EvaluationEnvironment) or "examples" not in environment.model_fields_set:
        return []
    if tasks is None or tasks >= environment.examples:
        return []
    why = f"the file has {count(tasks, 'task')}, so each evaluation uses all of them and no more"
    return [Violation("environments.examples", str(environment.examples), why, f"nearest: {tasks}")]


def _no_answer(code: int, err: str, environment: AnyEnvironment) -> tuple[str, str]:
    """Return why loading gave no result, and the fix: it timed out, or ended the interpreter."""
    stuck = err.rpartition("Timeout (")[2] if "Timeout (" in err else ""
    if stuck or code == -signal.SIGKILL:
        frames = [match for line in stuck.splitlines() if (match := _FRAME.match(line))]
        module = environment.id.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
        own_frames = [frame for frame in frames if f"/{module}/" in frame["file"] or f"/{module}.py" in frame["file"]]
        at = next(iter(own_frames or frames), None)
        place = f"; it is at {at['file']}, line {at['line']}, in {at['function']}" if at else ""
        return (
            f"has not loaded after {duration(environment.load_timeout_s)}{place}",
            "load less, or raise load_timeout_s",
        )
    last = (err.strip().splitlines() or ["no output"])[-1][:300]
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return f"loading it ended the interpreter ({how}): {last}", ""


def _placed(place: str, violation: Violation) -> Violation:
    return replace(violation, field=place + violation.field.removeprefix("environments"))
