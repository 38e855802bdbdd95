"""Whether the trainer can train on the data of SFT: no nodes are allocated to find that out.

The beginning of the file is read here. The Python of jobs, which has the tokenizer's library, renders lines of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primeslurm.base.errors import Violation
from primeslurm.base.paths import is_file
from primeslurm.chat.dataset_lines import LineErrors, parse_line, read_record
from primeslurm.chat.messages import ConversationError, MessageForm
from primeslurm.recipe import Recipe

if TYPE_CHECKING:
    from primeslurm.plan.checks.environments import Interpreter

LOOKED_AT = 1 << 24
"""Bytes of the file that are read here."""
PROBE = "primeslurm.trainer.data.probe"
_LIMIT_S = 180.0
"""For the tokenizer's library to be imported, from however slow a file system, and half a minute of rendering."""
_ANY = MessageForm(roles=None)
"""Which roles the chat template knows, rendering tells."""


@dataclass(frozen=True)
class Rendered:
    """What rendering the data showed."""

    violations: tuple[Violation, ...] = ()
    warnings: tuple[Violation, ...] = ()
    notes: tuple[Violation, ...] = ()
    unprepared: str = ""
    """The package that the interpreter lacks, so that nothing could be rendered."""


def data_problems(recipe: Recipe) -> list[Violation]:
    """Find lines that are no conversations, the first of each kind; none if the file is not here.

    Args:
        recipe: with the data's absolute path.
    """
    if recipe.task != "sft" or recipe.sft is None or not is_file(path := Path(recipe.sft.data.path)):
        return []
    try:
        lines, size = list(_lines(path)), path.stat().st_size
    except OSError as error:
        return [Violation("sft.data.path", str(path), f"cannot be read: {error.strerror}")]
    if not lines and size < LOOKED_AT:
        return [Violation("sft.data.path", str(path), "holds no conversation", "one JSON object a line")]
    errors = LineErrors(path)
    for start, line in lines:
        try:
            record, _ = parse_line(line, images=recipe.model.vlm is not None)
            read_record(record, recipe.sft.data.train == "all", _ANY)
        except ConversationError as error:
            errors.add(error, start)
    return errors.violations()


def render_data(recipe: Recipe, interpreter: Interpreter) -> Rendered:
    """Render lines of the data with the Python of jobs, as the trainer does.

    Args:
        recipe: with absolute paths of model and data, which are here.
        interpreter: is here.
    """
    # Not above: `render` reads data and renders none.
    from primeslurm.plan.checks.environments import run_module, why_no_answer
    from primeslurm.wire.decoding import DamagedError
    from primeslurm.wire.probe_messages import DataAnswer, DataRequest, decoded, encoded

    assert recipe.sft is not None
    data = recipe.sft.data
    asked = DataRequest(data.path, recipe.model.path, data.train == "all", recipe.model.vlm is not None)
    code, out, err = run_module(interpreter, PROBE, encoded(asked), _LIMIT_S)
    try:
        answer = decoded(out, DataAnswer) if code == 0 else None
    except DamagedError:
        answer = None
    if answer is not None:
        return Rendered(tuple(answer.violations), tuple(answer.warnings), tuple(answer.notes))
    lacks, how = why_no_answer(code or None, err)
    if lacks:
        return Rendered(unprepared=lacks)
    return Rendered((Violation("sft.data.path", data.path, f"cannot be rendered: {interpreter.python} {how}"),))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines at the beginning of a file that are whole and not empty, and the bytes where they begin."""
    with path.open("rb") as file:
        lines = file.read(LOOKED_AT).split(b"\n")
        if file.read(1):
            lines.pop()
    start = 0
    for line in lines:
        if line.strip():
            yield start, line
        start += len(line) + 1
