"""What `check` and nodes ask of `orchestrator.environments.probe` and `trainer.data.probe`: a line of JSON each way.

Both ends are of one release, and of one process tree.
"""

from __future__ import annotations

import json
from typing import Generic, TypeVar

import msgspec

from primeslurm.base.errors import Violation
from primeslurm.wire.decoding import DamagedError

T = TypeVar("T")
UNKNOWN = "no such environment"
"""Why an environment does not load that is neither bundled nor a module that can be imported."""


class ProbeRequest(msgspec.Struct, frozen=True):
    """What to try, as sections of a recipe: fields by name."""

    environments: list[dict[str, object]]
    model: dict[str, object]


class EnvironmentAnswer(msgspec.Struct, frozen=True):
    """What loading an environment and its first task showed."""

    violations: list[Violation] = []
    """What would go wrong anywhere."""
    missing: list[Violation] = []
    """What this host lacks."""
    notes: list[Violation] = []
    """What rollouts do that not everybody wants."""
    tools: list[tuple[str, str]] = []
    """Agents that offer the model tools: where the recipe says their harness, and its name."""
    tasks: int | None = None
    """Number of tasks in the local file that the environment reads. None: it reads none, or the file has more tasks
    than were read."""


class ModelAnswer(msgspec.Struct, frozen=True):
    """What choosing a model's renderer showed."""

    violations: list[Violation] = []
    """Why none can be chosen."""
    no_tools: str = ""
    """Why the one that was chosen cannot render tools; "" if it can."""


class ProbeResult(msgspec.Struct, Generic[T], frozen=True):
    """What came of one environment, or of the model, each of which is tried in a process of its own."""

    answer: T | None
    """None if its process did not get so far."""
    code: int
    """Exit code of its process; negative: by that signal."""
    stderr: str


class ProbeResults(msgspec.Struct, frozen=True):
    """The answer to a request."""

    environments: list[ProbeResult[EnvironmentAnswer]]
    """In the order of the request."""
    model: ProbeResult[ModelAnswer]


class DataRequest(msgspec.Struct, frozen=True):
    """Which data of SFT to render, as the trainer does."""

    path: str
    """JSONL."""
    model: str
    """Directory of the tokenizer."""
    every: bool
    """Every answer of the assistant is trained, not only the last."""
    sees: bool
    """Images are trained on, too."""


class DataAnswer(msgspec.Struct, frozen=True):
    """What rendering data of SFT showed."""

    violations: list[Violation] = []
    """What would end the run, the first line of each kind."""
    warnings: list[Violation] = []
    notes: list[Violation] = []


def encoded(message: msgspec.Struct) -> str:
    """Encode a message. An error's text may hold half a surrogate pair, which msgspec's own JSON refuses."""
    return json.dumps(msgspec.to_builtins(message))


def decoded(text: str, kind: type[T]) -> T:
    """Decode a message.

    Raises:
        DamagedError: it is not one of this kind.
    """
    try:
        return msgspec.convert(json.loads(text), kind)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
