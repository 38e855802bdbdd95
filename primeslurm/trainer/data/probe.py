"""Can the trainer render this data for this model? `python -m primeslurm.trainer.data.probe`.

It reads a `DataRequest` from standard input and answers with a `DataAnswer` on standard output. It needs the tokenizer
and no torch, whose import takes longer than all else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from primeslurm.base.errors import Violation
from primeslurm.chat import ChatMessage
from primeslurm.chat.dataset_lines import Dialogue, LineErrors, line_number, parse_line, read_record
from primeslurm.chat.messages import THOUGHTS, ConversationError
from primeslurm.chat.training_text import TrainingText
from primeslurm.chat.turn_ends import no_end
from primeslurm.wire.batches import inline_images
from primeslurm.wire.probe_messages import DataAnswer, DataRequest, decoded, encoded

READ = 256 << 20
"""Bytes of the file whose lines are read. Beyond these, only the lines that are rendered are."""
RENDERED = 32
"""Lines at the beginning of the file that are rendered, and as many that are spread over all of it."""
ENOUGH_S = 30.0
"""After this time nothing more is looked at. The trainer reads the whole file, and names any other line."""


def main() -> None:
    """Answer."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # so that transformers does not find it
    print(encoded(look(decoded(sys.stdin.read(), DataRequest))))


def look(asked: DataRequest) -> DataAnswer:
    """Read the data's lines and render some of them."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(asked.model)
    except Exception as error:  # a file that is missing, or a tokenizer that is a program beside the model
        words = (str(error).strip().splitlines() or [""])[0][:300]
        why = f"its tokenizer cannot be loaded: {type(error).__name__}: {words}"
        return DataAnswer([Violation("model.path", asked.model, why, "give a directory with a tokenizer.json")])
    text = TrainingText(tokenizer, asked.every)
    found = _Look(asked, text)
    violations = found.errors.violations()
    if found.converses and text.template.source and text.ends.answer is None:
        none = no_end(text.template)
        violations = [each for each in violations if none.why not in each.why]
        violations.insert(0, Violation("model.path", asked.model, none.why, none.fix))
    return DataAnswer(violations, found.warnings(), _notes(text, found.converses))


class _Look:
    """A look at the lines of a file.

    Args:
        asked: names the file.
        text: makes text to train on of a line.
    """

    def __init__(self, asked: DataRequest, text: TrainingText) -> None:
        self._asked, self._text, self._path = asked, text, Path(asked.path)
        self.errors = LineErrors(self._path)
        self.converses = False
        """Whether there are conversations, not only prompts and completions."""
        self._thinks: int | None = None
        """Where the first line begins whose trained answers have thoughts."""
        enough = time.monotonic() + ENOUGH_S
        for start, line, is_rendered in _lines(self._path):
            if time.monotonic() > enough:
                break
            try:
                self._line(start, line, is_rendered)
            except ConversationError as error:
                self.errors.add(error, start)
            except Exception as error:  # half a surrogate pair, for one
                self.errors.add(ConversationError(f"{type(error).__name__}: {error}"[:300]), start)

    def _line(self, start: int, line: bytes, is_rendered: bool) -> None:
        record, sources = parse_line(line, images=self._asked.sees)
        read = read_record(record, self._asked.every, self._text.template.form)
        if isinstance(read, Dialogue):
            self.converses = True
            if self._thinks is None and _has_thoughts(read.messages, self._asked.every):
                self._thinks = start
        if is_rendered:
            _must_be_there(sources, self._path.parent)
            self._text.parts(record)

    def warnings(self) -> list[Violation]:
        """Say what will not do what one expects."""
        asked, template, found = self._asked, self._text.template, []
        if unlisted := self._text.ends.unlisted():
            why = f"turns end with {' or '.join(unlisted)}, and engines that serve this model do not stop there"
            ids = ", ".join(str(template.tokenizer.convert_tokens_to_ids(token)) for token in unlisted)
            fix = f"list {ids} as eos_token_id in generation_config.json"
            found.append(Violation("model.path", asked.model, why, fix))
        if self._thinks is not None and not template.shows_thoughts:
            line = line_number(self._path, self._thinks)
            why = f"line {line}: the chat template does not show the thoughts of an answer, so they are not learned"
            fix = "leave them out, or use a model that thinks"
            found.append(Violation("sft.data.path", asked.path, why, fix))
        return found


def _must_be_there(sources: list[str], directory: Path) -> None:
    for source in sources:
        if not inline_images.is_inline(source) and not (directory / source).is_file():
            raise ConversationError("an image is not there", "a path relative to the data, or a data URI", shown=source)


def _has_thoughts(messages: list[ChatMessage], every: bool) -> bool:
    answers = [message for message in messages if message["role"] == "assistant"]
    return any(message.get(name) for message in (answers if every else answers[-1:]) for name in THOUGHTS)


def _notes(text: TrainingText, converses: bool) -> list[Violation]:
    """Say which token ends a turn."""
    answer, call = text.ends.answer, text.ends.call
    if answer is None:
        return []
    own = f", one that calls tools with {call.token}" if call is not None and call != answer else ""
    what = "an answer of the assistant" if converses else "a completion"
    return [Violation("sft.data", "", f"{what} ends with {answer.token}{own}; this token is trained, too")]


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Lines that are not empty: where each begins, what it says, and whether it is to be rendered."""
    size = path.stat().st_size
    marks = iter([size * i // RENDERED for i in range(1, RENDERED)] + [size])
    mark, number = next(marks), 0
    with path.open("rb") as file:
        while (start := file.tell()) < size:
            if start > READ and start < mark:
                file.seek(mark - 1)
                file.readline()
                start = file.tell()
            line = file.readline()
            if not line.strip():
                continue
            number += 1
            passed = start >= mark
            while start >= mark and mark < size:
                mark = next(marks)
            yield start, line, number <= RENDERED or passed


if __name__ == "__main__":
    main()
