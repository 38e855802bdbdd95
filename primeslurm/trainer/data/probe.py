"""Check that SFT data can be rendered and tokenized for a model: `python -m primeslurm.trainer.data.probe`.

Reads a `DataRequest` from standard input and writes a `DataAnswer` to standard output. It runs without torch, because
importing torch would take longer than the check.
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

# Lines within the first PARSED_BYTES bytes of the file are parsed. After them, only the rendered sample is read.
PARSED_BYTES = 256 << 20
# Number of lines rendered from the start of the file, and again spread over the whole file
SAMPLE_LINES = 32
# The check stops after this time [s]. The trainer reads the whole file and reports any other bad line.
TIME_LIMIT_S = 30.0


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # keeps transformers from importing it
    print(encoded(check(decoded(sys.stdin.read(), DataRequest))))


def check(request: DataRequest) -> DataAnswer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(request.model)
    except Exception as error:  # tokenizers with code of their own raise anything
        words = (str(error).strip().splitlines() or [""])[0][:300]
        why = f"its tokenizer cannot be loaded: {type(error).__name__}: {words}"
        return DataAnswer([Violation("model.path", request.model, why, "give a directory with a tokenizer.json")])
    text = TrainingText(tokenizer, request.every)
    scan = _Scan(request, text)
    violations = [*scan.errors.violations(), *scan.no_line_fits()]
    if scan.converses and text.template.source and text.ends.answer is None:
        none = no_end(text.template)
        violations = [each for each in violations if none.why not in each.why]
        violations.insert(0, Violation("model.path", request.model, none.why, none.fix))
    return DataAnswer(violations, scan.warnings(), _notes(text, scan.converses))


class _Scan:
    """A scan of the lines of the data file of a request, some of which are rendered as training text."""

    def __init__(self, request: DataRequest, text: TrainingText) -> None:
        self._request, self._text, self._path = request, text, Path(request.path)
        self.errors = LineErrors(self._path)
        self.converses = False  # whether there are conversations, beside pairs of prompt and completion
        self._thinks: int | None = None  # offset of the first line whose trained answers contain thoughts
        self._lengths: list[int] = []  # lengths of the lines of the sample that have no images [tokens]
        self._is_sample = False  # whether the file has other lines
        deadline = time.monotonic() + TIME_LIMIT_S
        for start, line, is_rendered in _lines(self._path):
            if time.monotonic() > deadline:
                self._is_sample = True
                break
            try:
                self._line(start, line, is_rendered)
            except ConversationError as error:
                self.errors.add(error, start)
            except Exception as error:  # for example, half a surrogate pair
                self.errors.add(ConversationError(f"{type(error).__name__}: {error}"[:300]), start)

    def _line(self, start: int, line: bytes, is_rendered: bool) -> None:
        record, sources = parse_line(line, images=self._request.sees)
        read = read_record(record, self._request.every, self._text.template.form)
        if isinstance(read, Dialogue):
            self.converses = True
            if self._thinks is None and _has_thoughts(read.messages, self._request.every):
                self._thinks = start
        if not is_rendered:
            self._is_sample = True
            return
        _must_be_there(sources, self._path.parent)
        parts = self._text.parts(record)
        if sources:  # the number of tokens of an image depends on its size, and longer lines are truncated
            self._is_sample = True
        else:
            self._lengths.append(sum(map(len, self._text.token_ids([part for part, _ in parts]))))

    def no_line_fits(self) -> list[Violation]:
        """Return a violation if every line of the file is longer than `seq_len`, which ends the run."""
        if self._is_sample or not self._lengths or min(self._lengths) <= self._request.seq_len:
            return []
        why = f"all lines have more than {self._request.seq_len} tokens; the shortest has {min(self._lengths)}"
        return [Violation("sft.data.path", self._request.path, why, "raise seq_len, or shorten the lines")]

    def warnings(self) -> list[Violation]:
        request, template, warnings = self._request, self._text.template, []
        too_long = [length for length in self._lengths if length > request.seq_len]
        if too_long and not self.no_line_fits():
            lines = f"{len(too_long)} of {len(self._lengths)} {'sampled ' if self._is_sample else ''}lines"
            why = f"{lines} have more than {request.seq_len} tokens (at most {max(too_long)}), and are not trained"
            warnings.append(Violation("sft.data.path", request.path, why, "raise seq_len, or shorten the lines"))
        if unlisted := self._text.ends.unlisted():
            why = f"turns end with {' or '.join(unlisted)}, and engines that serve this model do not stop there"
            ids = ", ".join(str(template.tokenizer.convert_tokens_to_ids(token)) for token in unlisted)
            fix = f"list {ids} as eos_token_id in generation_config.json"
            warnings.append(Violation("model.path", request.model, why, fix))
        if self._thinks is not None and not template.shows_thoughts:
            line = line_number(self._path, self._thinks)
            why = f"line {line}: the chat template does not show the thoughts of an answer, so they are not learned"
            fix = "remove them, or use a reasoning model"
            warnings.append(Violation("sft.data.path", request.path, why, fix))
        return warnings


def _must_be_there(sources: list[str], directory: Path) -> None:
    for source in sources:
        if not inline_images.is_inline(source) and not (directory / source).is_file():
            raise ConversationError("an image is not there", "a path relative to the data, or a data URI", shown=source)


def _has_thoughts(messages: list[ChatMessage], every: bool) -> bool:
    answers = [message for message in messages if message["role"] == "assistant"]
    return any(message.get(name) for message in (answers if every else answers[-1:]) for name in THOUGHTS)


def _notes(text: TrainingText, converses: bool) -> list[Violation]:
    answer, call = text.ends.answer, text.ends.call
    if answer is None:
        return []
    tool_calls = f", one that calls tools with {call.token}" if call is not None and call != answer else ""
    turn = "an answer of the assistant" if converses else "a completion"
    return [Violation("sft.data", "", f"{turn} ends with {answer.token}{tool_calls}; this token is trained, too")]


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the lines that are not empty: offset, content, and whether the line belongs to the rendered sample."""
    size = path.stat().st_size
    marks = iter([size * i // SAMPLE_LINES for i in range(1, SAMPLE_LINES)] + [size])
    mark, number = next(marks), 0
    with path.open("rb") as file:
        while (start := file.tell()) < size:
            # Beyond the parsed part, skip to the first line that begins at or after the next mark.
            if start > PARSED_BYTES and start < mark:
                file.seek(mark - 1)
                file.readline()
                start = file.tell()
            line = file.readline()
            if not line.strip():
                continue
            number += 1
            # A long line may pass several marks, but is rendered once.
            passed = start >= mark
            while start >= mark and mark < size:
                mark = next(marks)
            yield start, line, number <= SAMPLE_LINES or passed


if __name__ == "__main__":
    main()
