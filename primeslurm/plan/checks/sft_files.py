"""Check that the trainer can use the SFT data, before nodes are allocated.

The beginning of the file is parsed here. The Python of jobs, which has the tokenizer's library, renders some lines.
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

# Bytes of the file that are parsed here
LOOKED_AT = 1 << 24
PROBE = "primeslurm.trainer.data.probe"
# Timeout to import the tokenizer's library from a slow file system and to render for half a minute [s]
_LIMIT_S = 180.0
# Rendering checks the roles, because they depend on the chat template
_ANY = MessageForm(roles=None)


@dataclass(frozen=True)
class Rendered:
    """Result of rendering the data."""

    violations: tuple[Violation, ...] = ()
    warnings: tuple[Violation, ...] = ()
    notes: tuple[Violation, ...] = ()
    missing_package: str = ""  # package that the interpreter lacks, so that nothing could be rendered


def data_problems(recipe: Recipe) -> list[Violation]:
    """Return the first line of each kind that is not a conversation; empty if the file does not exist."""
    if recipe.task != "sft" or recipe.sft is None or not is_file(path := Path(recipe.sft.data.path)):
        return []
    try:
        lines, size = list(_lines(path)), path.stat().st_size
    except OSError as error:
        return [Violation("sft.data.path", str(path), f"cannot be read: {error.strerror}")]
    if not lines and size < LOOKED_AT:
        return [Violation("sft.data.path", str(path), "has no conversation", "write one JSON object per line")]
    errors = LineErrors(path)
    for start, line in lines:
        try:
            record, _ = parse_line(line, images=recipe.model.vlm is not None)
            read_record(record, recipe.sft.data.train == "all", _ANY)
        except ConversationError as error:
            errors.add(error, start)
    return errors.violations()


def render_data(recipe: Recipe, interpreter: Interpreter) -> Rendered:
    """Render lines of the data with the Python of jobs, as the trainer does. The recipe has absolute paths."""
    # Not above: `render` reads data and renders none.
    from primeslurm.plan.checks.environments import exit_reason, run_module
    from primeslurm.wire.decoding import DamagedError
    from primeslurm.wire.probe_messages import DataAnswer, DataRequest, decoded, encoded

    assert recipe.sft is not None
    data = recipe.sft.data
    sees = recipe.model.vlm is not None
    request = DataRequest(data.path, recipe.model.path, data.train == "all", sees, recipe.seq_len)
    code, out, err = run_module(interpreter, PROBE, encoded(request), _LIMIT_S)
    try:
        answer = decoded(out, DataAnswer) if code == 0 else None
    except DamagedError:
        answer = None
    if answer is not None:
        return Rendered(tuple(answer.violations), tuple(answer.warnings), tuple(answer.notes))
    lacks, how = exit_reason(code or None, err)
    if lacks:
        return Rendered(missing_package=lacks)
    return Rendered((Violation("sft.data.path", data.path, f"cannot be rendered: {interpreter.python} {how}"),))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the whole, non-empty lines at the beginning of a file, with their offsets."""
    with path.open("rb") as file:
        lines = file.read(LOOKED_AT).split(b"\n")
        if file.read(1):
            lines.pop()
    start = 0
    for line in lines:
        if line.strip():
            yield start, line
        start += len(line) + 1
