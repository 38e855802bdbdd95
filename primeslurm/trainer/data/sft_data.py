"""SFT data: JSONL conversations to packed token rows, in an order that depends only on the seed and the step."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from primeslurm.base import files
from primeslurm.chat.dataset_lines import line_number, parse_line
from primeslurm.chat.training_text import TrainingText
from primeslurm.trainer.data.image_reader import ImageReader, expand
from primeslurm.wire.batches.batch import Batch, BatchInfo, Row
from primeslurm.wire.batches.frames import Bool, Int32
from primeslurm.wire.batches.inline_images import ImageSpan, whole

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A tokenized conversation. `mask` marks the trained tokens. Both have shape [n_tokens]."""

    token_ids: Int32
    mask: Bool
    images: tuple[ImageSpan, ...] = ()

    def cut(self, length: int) -> Example:
        """Keep at most the first `length` tokens. If an image would be cut, drop it and everything after it."""
        length, images = whole(self.images, length)
        return Example(self.token_ids[:length], self.mask[:length], images)


class ExampleList(Protocol):
    """A sequence of all tokenized examples of a run, in the order of the data file."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True)
class Conversations:
    """A JSONL file of conversations, and the settings for tokenizing it.

    A line is {"messages": [...]}, of which the last message is trained, or {"prompt": ..., "completion": ...}. Beside
    `messages`, `tools` may list tools in the format of OpenAI's chat completions. The token that ends a turn is
    trained.
    """

    path: Path  # Path of the file. Image paths are relative to its directory.
    tokenizer: Any  # Hugging Face tokenizer with a chat template
    seq_len: int  # Maximum length of an example [tokens]. Longer ones are dropped, or truncated if they have images.
    reader: ImageReader | None = None  # Image reader. None for text-only training.
    every: bool = False  # whether every assistant message is trained, not only the last

    @cached_property
    def text(self) -> TrainingText:
        return TrainingText(self.tokenizer, self.every)

    def read(self, part: int = 0, parts: int = 1) -> Iterator[Example | None]:
        """Yield the examples in byte range `part` of `parts` equal ranges of the file; None for a too long one.

        Raises OSError, and ValueError with file and line if a line cannot be used.
        """
        for start, line in _lines(self.path, part, parts):
            if not line.strip():
                continue
            try:
                example = _tokenize(line, self.text, self.path.parent, self.reader)
            except (OSError, ValueError) as error:
                raise ValueError(f"{self.path}, line {line_number(self.path, start)}: {error}") from error
            except Exception as error:  # tokenizers and image processors may raise anything
                raise ValueError(f"{self.path}, line {line_number(self.path, start)}: {error!r}") from error
            yield _fitting(example, self.seq_len)

    def check_count(self, usable: int, too_long: int) -> None:
        """Log how many examples were dropped as `too_long`. Raise ValueError if none is `usable`."""
        if too_long:
            log.warning("%s: dropped %d examples of more than %d tokens", self.path, too_long, self.seq_len)
        if not usable:
            raise ValueError(f"{self.path}: no example of at most {self.seq_len} tokens")


def batch(
    examples: ExampleList,
    step: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    dp_rank: int,
    dp_world: int,
    joined: int = 1,
) -> Batch:
    """Return one rank's rows for `step` (from 1). Every rank gets the same number of rows.

    Rows have `seq_len` tokens. Up to `joined` rows become one longer row without padding between them.
    """
    chosen = [examples[i] for i in _indices(len(examples), (step - 1) * batch_size, batch_size, seed)]
    rows = _pack(chosen, seq_len)
    rows += [[] for _ in range(-len(rows) % dp_world)]
    rows = rows[dp_rank::dp_world]
    if joined > 1:
        count = -(-len(rows) // joined)
        rows = [[example for row in rows[start::count] for example in row] for start in range(count)]
    info = BatchInfo(
        step=step,
        dp_rank=dp_rank,
        dp_world=dp_world,
        # Nothing predicts the first token of a document, so it is not counted.
        loss_tokens=sum(int(example.mask[1:].sum()) for example in chosen),
        has_images=any(example.images for example in chosen),
        rows_at_once=1 if joined > 1 else 0,
    )
    return Batch(info, [_row(documents, seq_len) for documents in rows])


def _lines(path: Path, part: int, parts: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a part of a file, with their offsets."""
    size = files.retrying(path, path.stat).st_size
    begin, end = size * part // parts, size * (part + 1) // parts
    with path.open("rb") as file:
        if begin:
            file.seek(begin - 1)
            file.readline()  # skip the rest of a line that begins in the part before
        while (start := file.tell()) < end and (line := file.readline()):
            yield start, line


def _tokenize(line: bytes, text: TrainingText, directory: Path, reader: ImageReader | None) -> Example:
    record, sources = parse_line(line, images=reader is not None)
    parts = text.parts(record)
    encoded = text.token_ids([part for part, _ in parts])
    token_ids = np.asarray([token for ids in encoded for token in ids], np.int32)
    mask = np.repeat([trained for _, trained in parts], [len(ids) for ids in encoded])
    if reader is None:
        return Example(token_ids, mask)
    return Example(*expand(token_ids, mask, sources, directory, reader))


def _fitting(example: Example, seq_len: int) -> Example | None:
    """Return an example that fits `seq_len`, truncated if it has images. None if it cannot be used."""
    if not example.images:
        return example if len(example.token_ids) <= seq_len else None
    shorter = example.cut(seq_len)
    return shorter if shorter.mask[1:].any() else None


def _indices(count: int, start: int, size: int, seed: int) -> Iterator[int]:
    """Yield `size` indices from position `start` of an endless stream that is shuffled again in every epoch."""
    orders: dict[int, Any] = {}
    for position in range(start, start + size):
        epoch, offset = divmod(position, count)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(count)
        yield int(orders[epoch][offset])


def _pack(examples: Sequence[Example], seq_len: int) -> list[list[Example]]:
    """Pack examples by best fit decreasing: longest first, each into the fullest row with enough free tokens."""
    # Needs at most 11/9 of the optimal number of rows, plus one (Johnson et al. 1974, https://doi.org/10.1137/0203025).
    rows: list[list[Example]] = []
    free_tokens: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for example in sorted(examples, key=lambda each: -len(each.token_ids)):
        tokens = len(example.token_ids)
        place = bisect_left(free_tokens, (tokens, 0))
        if place == len(free_tokens):
            free_tokens.append((seq_len, len(rows)))
            rows.append([])
        free, row = free_tokens.pop(place)
        rows[row].append(example)
        insort(free_tokens, (free - tokens, row))
    return rows


def _row(documents: Sequence[Example], seq_len: int) -> Row:
    """Return a row of documents, padded to a multiple of `seq_len`."""
    firsts = np.cumsum([0, *(len(d.token_ids) for d in documents)])
    length = max(1, -(-firsts[-1] // seq_len)) * seq_len
    padding = length - firsts[-1]
    lengths = [*(len(d.token_ids) for d in documents), padding]
    empty = np.zeros(padding, np.int32)
    return Row(
        token_ids=np.concatenate([*(d.token_ids for d in documents), empty]),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        mask=np.concatenate([*(d.mask for d in documents), empty.astype(bool)]),
        logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        temperatures=np.ones(length, np.float32),
        on_policy=np.zeros(length, np.bool_),
        images=tuple(image.moved(first) for first, d in zip(firsts, documents, strict=False) for image in d.images),
    )
