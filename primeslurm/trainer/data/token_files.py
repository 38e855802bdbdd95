"""Tokenized conversations of a run, on its file system: each rank makes a part of them once, and all ranks map all.

Rendering and tokenizing a long conversation takes a tenth of a second, and its tokens five bytes each in memory: of a
hundred thousand conversations that would be hours and tens of GB for each rank, in each attempt.

    <run>/tokens/NNNNN.tokens     of a part: 4 bytes a token, those that are trained inverted
    <run>/tokens/NNNNN.ends       where its examples end [tokens], 8 bytes each
    <run>/tokens/record.json      what they were made of; written last
"""

from __future__ import annotations

import hashlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from primeslurm import durable
from primeslurm.records.beats import pulse
from primeslurm.trainer.data.sft_data import Conversations, Example, ExampleList
from primeslurm.trainer.distributed.space import waiting_for_space
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.decoding import DamagedError, json_value

_TOKEN = np.dtype("<i4")
_END = np.dtype("<i8")
_TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a model's directory that say how it tokenizes, among others."""


class Part(msgspec.Struct, frozen=True):
    """What one rank has made."""

    examples: int
    tokens: int
    too_long: int
    """Examples that were left out."""


class TokensRecord(msgspec.Struct, frozen=True):
    """What the files were made of, and what they hold."""

    made_of: str
    parts: tuple[Part, ...]


class TokenFiles:
    """The examples, mapped: what a batch needs of them is read when it is formed."""

    def __init__(self, directory: Path, parts: tuple[Part, ...]) -> None:
        self._tokens = [_mapped(_tokens_of(directory, i), _TOKEN, part.tokens) for i, part in enumerate(parts)]
        self._ends = [_mapped(_ends_of(directory, i), _END, part.examples) for i, part in enumerate(parts)]
        self._last = np.cumsum([part.examples for part in parts])

    def __len__(self) -> int:
        return int(self._last[-1])

    def __getitem__(self, index: int, /) -> Example:
        part = int(np.searchsorted(self._last, index, side="right"))
        place = index - (int(self._last[part - 1]) if part else 0)
        ends = self._ends[part]
        kept = np.array(self._tokens[part][int(ends[place - 1]) if place else 0 : int(ends[place])])
        mask = kept < 0
        return Example(np.where(mask, ~kept, kept).astype(np.int32), mask)


def tokenized(run_dir: Path, conversations: Conversations, source: Path, world: World) -> ExampleList:
    """Return the examples of a run, which are made unless they are there. All ranks call this together.

    Args:
        run_dir: of the run.
        conversations: without images.
        source: directory of the model, whose tokenizer is that of the conversations.
        world: the ranks; those of an attempt may be more or fewer than those that made them.

    Raises:
        RankError: a rank cannot read its part, a line of it is wrong, or no example is short enough.
    """
    directory = run_dir / "tokens"
    made_of = world.share(_made_of(conversations, source) if world.is_main else "")
    record = world.share(_read(directory, made_of) if world.is_main else None)
    if record is None:
        make = partial(_make, directory, conversations, made_of, world)
        record = waiting_for_space(world, run_dir, make, directory)
    return TokenFiles(directory, record.parts)


def remove(run_dir: Path) -> None:
    """Delete the files of a run that needs them no more, as far as that is possible."""
    shutil.rmtree(run_dir / "tokens", ignore_errors=True)


def write_part(directory: Path, conversations: Conversations, index: int, parts: int) -> Part:
    """Make one of so many parts of the files, on disk when this returns. Raises what `Conversations.read` does."""
    ends: list[int] = []
    done = too_long = 0
    path = _tokens_of(directory, index)
    with path.open("wb") as file:
        for example in conversations.read(index, parts):
            pulse().beat()
            if example is None:
                too_long += 1
                continue
            file.write(np.where(example.mask, ~example.token_ids, example.token_ids).astype(_TOKEN).tobytes())
            done += len(example.token_ids)
            ends.append(done)
    _ends_of(directory, index).write_bytes(np.asarray(ends, _END).tobytes())
    durable.sync(path)
    durable.sync(_ends_of(directory, index))
    return Part(len(ends), done, too_long)


def _make(directory: Path, conversations: Conversations, made_of: str, world: World) -> TokensRecord:
    doing = "tokenizing the data"
    world.agree(_failure(partial(_empty, directory)) if world.is_main else None, doing)
    mine, failure = Part(0, 0, 0), None
    try:
        mine = write_part(directory, conversations, world.rank, world.size)
    except (OSError, ValueError) as error:
        failure = error
    world.agree(failure, doing)
    record = TokensRecord(made_of, tuple(world.collect(mine)))
    world.agree(_failure(partial(_complete, directory, conversations, record)) if world.is_main else None, doing)
    return record


def _empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    durable.make_directory(directory)


def _complete(directory: Path, conversations: Conversations, record: TokensRecord) -> None:
    conversations.judge(sum(part.examples for part in record.parts), sum(part.too_long for part in record.parts))
    durable.sync(directory)
    durable.write(directory / "record.json", msgspec.json.encode(record))


def _failure(work: partial[None]) -> Exception | None:
    try:
        work()
    except (OSError, ValueError) as error:
        return error
    return None


def _read(directory: Path, made_of: str) -> TokensRecord | None:
    """The record of what is there, if it is whole and of the same."""
    try:
        record = json_value((directory / "record.json").read_bytes(), TokensRecord)
        whole = all(_is_whole(directory, i, part) for i, part in enumerate(record.parts))
    except (OSError, DamagedError):
        return None
    return record if whole and record.made_of == made_of else None


def _is_whole(directory: Path, index: int, part: Part) -> bool:
    sizes = _tokens_of(directory, index).stat().st_size, _ends_of(directory, index).stat().st_size
    return sizes == (part.tokens * _TOKEN.itemsize, part.examples * _END.itemsize)


def _made_of(conversations: Conversations, source: Path) -> str:
    """A digest of all that decides what the files hold."""
    about = conversations.path.stat()
    found = hashlib.sha256(f"{conversations.path} {about.st_size} {about.st_mtime_ns}".encode())
    found.update(f"{conversations.seq_len} {conversations.every}".encode())
    for path in sorted({path for pattern in _TOKENIZER for path in source.glob(pattern)}):
        found.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _mapped(path: Path, kind: np.dtype[Any], count: int) -> NDArray[Any]:
    return np.memmap(path, kind, "r") if count else np.zeros(0, kind)  # no file of no bytes can be mapped


def _tokens_of(directory: Path, index: int) -> Path:
    return directory / f"{index:05}.tokens"


def _ends_of(directory: Path, index: int) -> Path:
    return directory / f"{index:05}.ends"
