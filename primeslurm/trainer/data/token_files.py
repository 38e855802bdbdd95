"""Tokenized conversations of a run, on its file system: each rank makes a part of them once, and all ranks map all.

A long conversation takes tens of milliseconds, one with images has them looked at, and a token is five bytes in memory:
of a hundred thousand conversations that would be half an hour and 15 GB for each rank, in each attempt.

    <run>/tokens/NNNNN.tokens     of a part: 4 bytes a token, those that are trained inverted
    <run>/tokens/NNNNN.images     of the same part: where images are in its tokens
    <run>/tokens/NNNNN.ends       where its examples end in both, 8 bytes each
    <run>/tokens/record.json      what they were made of; written last
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from primeslurm.base import durable, files
from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.data.sft_data import Conversations, Example, ExampleList
from primeslurm.trainer.distributed.disk_space import retry_while_full
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.batches.rollouts import ImageSpan
from primeslurm.wire.decoding import DamagedError, decode_json, value

_TOKEN = np.dtype("<i4")
_END = np.dtype("<i8")
_BYTE = np.dtype("u1")
_KINDS = ("tokens", "images", "ends")
_MASKS = 2
"""Counts how often it has changed which tokens are trained: a run that resumes does not use older masks."""
_DOING = "tokenizing the data"
_TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a model's directory that say how it tokenizes, among others."""


class Part(msgspec.Struct, frozen=True):
    """What one rank has made."""

    examples: int
    tokens: int
    image_bytes: int
    too_long: int
    """Examples that were left out."""


class TokensRecord(msgspec.Struct, frozen=True):
    """What the files were made of, and what they hold."""

    made_of: str
    parts: tuple[Part, ...]


class TokenFiles:
    """The examples, mapped: what a batch needs of them is read when it is formed."""

    def __init__(self, directory: Path, parts: tuple[Part, ...]) -> None:
        named = [(part, partial(_file, directory, i)) for i, part in enumerate(parts)]
        self._tokens = [_mapped(file("tokens"), _TOKEN, (part.tokens,)) for part, file in named]
        self._images = [_mapped(file("images"), _BYTE, (part.image_bytes,)) for part, file in named]
        self._ends = [_mapped(file("ends"), _END, (part.examples, 2)) for part, file in named]
        self._last = np.cumsum([part.examples for part in parts])

    def __len__(self) -> int:
        return int(self._last[-1])

    def __getitem__(self, index: int, /) -> Example:
        part = int(np.searchsorted(self._last, index, side="right"))
        place = index - (int(self._last[part - 1]) if part else 0)
        (first, image), (end, image_end) = self._ends[part][place - 1] if place else (0, 0), self._ends[part][place]
        kept = np.array(self._tokens[part][first:end])
        mask = kept < 0
        images: tuple[ImageSpan, ...] = ()
        if image < image_end:
            images = value(self._images[part][image:image_end].tobytes(), tuple[ImageSpan, ...])
        return Example(np.where(mask, ~kept, kept).astype(np.int32), mask, images)


def tokenized(run_dir: Path, conversations: Conversations, source: Path, world: World) -> ExampleList:
    """Return the examples of a run, which are made unless they are there. All ranks call this together.

    Args:
        run_dir: of the run.
        conversations: those of the recipe.
        source: directory of the model, whose tokenizer is that of the conversations.
        world: the ranks; those of an attempt may be more or fewer than those that made them.

    Raises:
        RankError: a rank cannot read its part, a line of it is wrong, or no example is short enough.
    """
    directory = run_dir / "tokens"
    made_of = world.share(world.attempt(lambda: _made_of(conversations, source) if world.is_main else "", _DOING))
    record = world.share(world.attempt(lambda: _read(directory, made_of) if world.is_main else None, _DOING))
    if record is None:
        make = partial(_make, directory, conversations, made_of, world)
        record = retry_while_full(world, run_dir, make, directory)
    return TokenFiles(directory, record.parts)


def remove(run_dir: Path) -> None:
    """Delete the files of a run that needs them no more, as far as that is possible."""
    files.remove_tree(run_dir / "tokens", ignore_errors=True)


def write_part(directory: Path, conversations: Conversations, index: int, parts: int) -> Part:
    """Make one of so many parts of the files, on disk when this returns. Raises what `Conversations.read` does."""
    ends: list[tuple[int, int]] = []
    tokens = image_bytes = too_long = 0
    file = partial(_file, directory, index)
    with file("tokens").open("wb") as of_tokens, file("images").open("wb") as of_images:
        for example in conversations.read(index, parts):
            liveness().heartbeat()
            if example is None:
                too_long += 1
                continue
            of_tokens.write(np.where(example.mask, ~example.token_ids, example.token_ids).astype(_TOKEN).tobytes())
            tokens += len(example.token_ids)
            if example.images:
                image_bytes += of_images.write(msgspec.msgpack.encode(example.images))
            ends.append((tokens, image_bytes))
    files.write_atomic(file("ends"), np.asarray(ends, _END).tobytes())
    for kind in _KINDS:
        durable.sync(file(kind))
    return Part(len(ends), tokens, image_bytes, too_long)


def _make(directory: Path, conversations: Conversations, made_of: str, world: World) -> TokensRecord:
    world.attempt(lambda: durable.make_anew(directory) if world.is_main else None, _DOING)
    mine = world.attempt(lambda: write_part(directory, conversations, world.rank, world.size), _DOING)
    record = TokensRecord(made_of, tuple(world.collect(mine)))
    world.attempt(lambda: _complete(directory, conversations, record) if world.is_main else None, _DOING)
    return record


def _complete(directory: Path, conversations: Conversations, record: TokensRecord) -> None:
    conversations.judge(sum(part.examples for part in record.parts), sum(part.too_long for part in record.parts))
    durable.sync(directory)
    durable.write(directory / "record.json", msgspec.json.encode(record))


def _read(directory: Path, made_of: str) -> TokensRecord | None:
    """The record of what is there, if it is whole and of the same."""
    try:
        record = decode_json(files.read_bytes(directory / "record.json"), TokensRecord)
        whole = all(_is_whole(directory, i, part) for i, part in enumerate(record.parts))
    except (FileNotFoundError, DamagedError):
        return None
    return record if whole and record.made_of == made_of else None


def _is_whole(directory: Path, index: int, part: Part) -> bool:
    about = [files.status(_file(directory, index, kind)) for kind in _KINDS]
    sizes = [each.st_size if each else None for each in about]
    return sizes == [part.tokens * _TOKEN.itemsize, part.image_bytes, part.examples * 2 * _END.itemsize]


def _made_of(conversations: Conversations, source: Path) -> str:
    """A digest of all that decides what the files hold."""
    about = files.retrying(conversations.path, conversations.path.stat)
    found = hashlib.sha256(f"{conversations.path} {about.st_size} {about.st_mtime_ns}".encode())
    found.update(f"{conversations.seq_len} {conversations.every} {conversations.reader is not None} {_MASKS}".encode())
    for path in sorted({path for pattern in _TOKENIZER for path in files.listing(source, pattern)}):
        found.update(path.name.encode() + hashlib.sha256(files.read_bytes(path)).digest())
    return found.hexdigest()


def _mapped(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.memmap(path, kind, "r", shape=shape) if shape[0] else np.zeros(shape, kind)  # no empty file can be mapped


def _file(directory: Path, index: int, kind: str) -> Path:
    return directory / f"{index:05}.{kind}"
