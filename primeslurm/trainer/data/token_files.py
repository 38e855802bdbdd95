"""Tokenized SFT data in the run directory: each rank tokenizes a part of the data once, and all ranks map all parts.

Files in `<run>/tokens`:
    NNNNN.tokens     tokens of a part, 4 bytes each; trained tokens are bitwise inverted
    NNNNN.images     image spans of the same part
    NNNNN.ends       end of each example in both files, 8 bytes each
    record.json      digest of the inputs and sizes of the parts, written last
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
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.decoding import DamagedError, decode_json, decode_msgpack

_TOKEN = np.dtype("<i4")
_END = np.dtype("<i8")
_BYTE = np.dtype("u1")
_KINDS = ("tokens", "images", "ends")
# Version of the rule that selects the trained tokens. A resumed run does not reuse files of another version.
_MASK_VERSION = 2
_DOING = "tokenizing the data"
# Files of a model directory that may define its tokenizer
_TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


class Part(msgspec.Struct, frozen=True):
    """Amount of data in the files of one part, which one rank tokenized."""

    examples: int
    tokens: int
    image_bytes: int
    too_long: int  # number of dropped examples


class TokensRecord(msgspec.Struct, frozen=True):
    """Contents of record.json."""

    made_of: str
    parts: tuple[Part, ...]


class TokenFiles:
    """All tokenized examples of a run, memory-mapped from `<run>/tokens`. Only accessed examples are read."""

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
        stored = np.array(self._tokens[part][first:end])
        mask = stored < 0  # trained tokens are stored inverted, and ids are never negative
        images: tuple[ImageSpan, ...] = ()
        if image < image_end:
            images = decode_msgpack(self._images[part][image:image_end].tobytes(), tuple[ImageSpan, ...])
        return Example(np.where(mask, ~stored, stored).astype(np.int32), mask, images)


def tokenized(run_dir: Path, conversations: Conversations, source: Path, world: World) -> ExampleList:
    """Return the examples of a run, and tokenize them first unless an earlier attempt did. A collective.

    Raises RankError if a rank cannot read its part, a line is invalid, or no example is short enough.
    """
    # Without these files, each rank would tokenize everything in each attempt. For 100,000 long conversations, that
    # would take half an hour and 15 GB per rank.
    directory = run_dir / "tokens"
    made_of = world.share(world.attempt(lambda: _made_of(conversations, source) if world.is_main else "", _DOING))
    record = world.share(world.attempt(lambda: _read(directory, made_of) if world.is_main else None, _DOING))
    if record is None:
        make = partial(_make, directory, conversations, made_of, world)
        record = retry_while_full(world, run_dir, make, directory)
    return TokenFiles(directory, record.parts)


def remove(run_dir: Path) -> None:
    """Delete the files of a finished run. Ignores errors."""
    files.remove_tree(run_dir / "tokens", ignore_errors=True)


def write_part(directory: Path, conversations: Conversations, index: int, parts: int) -> Part:
    """Tokenize one part and flush its files to disk. Raises as `Conversations.read`."""
    ends: list[tuple[int, int]] = []
    tokens = image_bytes = too_long = 0
    file = partial(_file, directory, index)
    with file("tokens").open("wb") as tokens_file, file("images").open("wb") as images_file:
        for example in conversations.read(index, parts):
            liveness().heartbeat()
            if example is None:
                too_long += 1
                continue
            tokens_file.write(np.where(example.mask, ~example.token_ids, example.token_ids).astype(_TOKEN).tobytes())
            tokens += len(example.token_ids)
            if example.images:
                image_bytes += images_file.write(msgspec.msgpack.encode(example.images))
            ends.append((tokens, image_bytes))
    files.write_atomic(file("ends"), np.asarray(ends, _END).tobytes())
    for kind in _KINDS:
        durable.sync(file(kind))
    return Part(len(ends), tokens, image_bytes, too_long)


def _make(directory: Path, conversations: Conversations, made_of: str, world: World) -> TokensRecord:
    world.attempt(lambda: durable.make_anew(directory) if world.is_main else None, _DOING)
    local_part = world.attempt(lambda: write_part(directory, conversations, world.rank, world.size), _DOING)
    record = TokensRecord(made_of, tuple(world.collect(local_part)))
    world.attempt(lambda: _complete(directory, conversations, record) if world.is_main else None, _DOING)
    return record


def _complete(directory: Path, conversations: Conversations, record: TokensRecord) -> None:
    conversations.check_count(sum(part.examples for part in record.parts), sum(part.too_long for part in record.parts))
    durable.sync(directory)
    durable.write(directory / "record.json", msgspec.json.encode(record))


def _read(directory: Path, made_of: str) -> TokensRecord | None:
    """Read record.json. Return None if the files are incomplete or their input digest is not `made_of`."""
    try:
        record = decode_json(files.read_bytes(directory / "record.json"), TokensRecord)
        complete = all(_is_whole(directory, i, part) for i, part in enumerate(record.parts))
    except (FileNotFoundError, DamagedError):
        return None
    return record if complete and record.made_of == made_of else None


def _is_whole(directory: Path, index: int, part: Part) -> bool:
    statuses = [files.status(_file(directory, index, kind)) for kind in _KINDS]
    sizes = [each.st_size if each else None for each in statuses]
    return sizes == [part.tokens * _TOKEN.itemsize, part.image_bytes, part.examples * 2 * _END.itemsize]


def _made_of(conversations: Conversations, source: Path) -> str:
    """Return a digest of everything that determines the contents of the files."""
    status = files.retrying(conversations.path, conversations.path.stat)
    hasher = hashlib.sha256(f"{conversations.path} {status.st_size} {status.st_mtime_ns}".encode())
    hasher.update(
        f"{conversations.seq_len} {conversations.every} {conversations.reader is not None} {_MASK_VERSION}".encode()
    )
    for path in sorted({path for pattern in _TOKENIZER for path in files.listing(source, pattern)}):
        hasher.update(path.name.encode() + hashlib.sha256(files.read_bytes(path)).digest())
    return hasher.hexdigest()


def _mapped(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return (
        np.memmap(path, kind, "r", shape=shape) if shape[0] else np.zeros(shape, kind)
    )  # empty files cannot be mapped


def _file(directory: Path, index: int, kind: str) -> Path:
    return directory / f"{index:05}.{kind}"
