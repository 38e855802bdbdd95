"""Messages between `check` or preflight and the probes of environments and SFT data: a line of JSON each way.

Both ends are of the same release, in one process tree. The probes are `orchestrator.environments.probe` and
`trainer.data.probe`.
"""

from __future__ import annotations

import json
from typing import Generic, TypeVar

import msgspec

from primeslurm.base.errors import Violation
from primeslurm.wire.decoding import DamagedError

T = TypeVar("T")
UNKNOWN = "no such environment"  # why an environment does not load that is neither bundled nor an importable module


class ProbeRequest(msgspec.Struct, frozen=True):
    """Asks a probe to load environments and select the model's renderer, given those sections of a recipe."""

    environments: list[dict[str, object]]
    model: dict[str, object]
    max_len: int | None = None  # longest sequence of an engine [tokens]. None: prompts are not compared with it


class EnvironmentAnswer(msgspec.Struct, frozen=True):
    """Result of loading an environment and its first task."""

    violations: list[Violation] = []  # problems on any host
    missing: list[Violation] = []  # software that this host lacks
    warnings: list[Violation] = []  # tasks whose rollouts will fail
    notes: list[Violation] = []  # side effects of rollouts that a user should know
    tools: list[tuple[str, str]] = []  # recipe field and name of each harness that offers the model tools
    # Number of tasks in the local file that the environment reads. None: it reads none, or the file has more tasks than
    # were read.
    tasks: int | None = None


class ModelAnswer(msgspec.Struct, frozen=True):
    """Result of selecting a model's renderer."""

    violations: list[Violation] = []  # why no renderer can be selected
    no_tools: str = ""  # why the selected renderer cannot render tools; "" if it can


class ProbeResult(msgspec.Struct, Generic[T], frozen=True):
    """Result for one environment or the model. Each is probed in its own process."""

    answer: T | None  # None if its process failed
    code: int  # exit code of its process; negative: ended by that signal
    stderr: str


class ProbeResults(msgspec.Struct, frozen=True):
    """The answer to a ProbeRequest."""

    environments: list[ProbeResult[EnvironmentAnswer]]  # in the order of the request
    model: ProbeResult[ModelAnswer]


class DataRequest(msgspec.Struct, frozen=True):
    """Asks a probe to render SFT data as the trainer does."""

    path: str  # JSONL file
    model: str  # directory of the tokenizer
    every: bool  # whether every answer of the assistant is trained, or only the last
    sees: bool  # whether images are trained
    seq_len: int  # longest line that is trained [tokens]


class DataAnswer(msgspec.Struct, frozen=True):
    """Findings of a check that renders the examples of SFT data."""

    violations: list[Violation] = []  # problems that would end the run, with the first line of each kind
    warnings: list[Violation] = []
    notes: list[Violation] = []


def encoded(message: msgspec.Struct) -> str:
    """Return a message as JSON. Its texts may contain surrogates, which msgspec's own encoder refuses."""
    return json.dumps(msgspec.to_builtins(message))


def decoded(text: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(json.loads(text), kind)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
