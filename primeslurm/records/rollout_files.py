"""The files of the rollout archive, `rollouts/archive/`.

A file holds some rollouts of one step. It is written once, under a temporary name, so a reader sees all of it or
nothing. Its head has the summaries of its rollouts and where each rollout is in the file:

    MAGIC | raw size, compressed size, CRC-32 of the compressed head (big-endian, 4 bytes each) | head | rollouts

Head and rollouts are msgpack, compressed with zstd. Trainer ranks write their log-probabilities of a step's kept
rollouts to files of their own, once they have trained the step.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec
import numpy as np

from primeslurm.base import files
from primeslurm.base.errors import RunError
from primeslurm.records.rollouts import (
    AgentConversation,
    Message,
    MessageSpan,
    RolloutSummary,
    RolloutTranscript,
    TokenSequence,
)

T = TypeVar("T")
# In the run directory.
DIRECTORY = Path("rollouts", "archive")
SUFFIX = ".rollouts"
LOGPROBS_SUFFIX = ".logprobs"
MAGIC = b"PSROLLS1"
_SIZES = struct.Struct(">III")
# Largest head or rollout that a reader decompresses [bytes]. A rollout of a million tokens has about 40 MB.
LARGEST_BYTES = 1 << 28
_FIRST_READ_BYTES = 1 << 14


class DamagedFileError(ValueError):
    """A file of the archive does not have its format."""


# Content of a file: rollouts of a step's batch, rollouts that were dropped or failed before it, or an evaluation.
KINDS = ("batch", "dropped", "evaluation")


class FileName(NamedTuple):
    """The parts of a file's name. Files sort by step, attempt and number."""

    step: int
    attempt: int
    kind: str  # one of KINDS
    number: int  # of the file within its step, attempt and kind

    def __str__(self) -> str:
        return f"{self.stem}{self.kind}-{self.number:04d}{SUFFIX}"

    @property
    def stem(self) -> str:
        """The beginning of the names of all files of this step and attempt."""
        return f"{self.step:08d}-{self.attempt:03d}-"


def parse_name(name: str) -> FileName | None:
    """Return what a file's name says, or None if it is no file of the archive."""
    parts = name.removesuffix(SUFFIX).split("-")
    if not name.endswith(SUFFIX) or len(parts) != 4 or parts[2] not in KINDS:
        return None
    if not all(part.isdecimal() for part in (parts[0], parts[1], parts[3])):
        return None
    return FileName(int(parts[0]), int(parts[1]), parts[2], int(parts[3]))


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Position of a rollout in a file: bytes after the head, and sizes before and after decompression."""

    offset: int
    size: int
    raw_size: int
    crc: int


class _Head(msgspec.Struct, frozen=True):
    summaries: list[RolloutSummary]
    places: list[Place]


class Logprobs(NamedTuple):
    """The trainer's log-probabilities of a sequence."""

    positions: Any  # of the tokens, int32
    values: Any  # float32

    def spread(self, length: int) -> list[float | None]:
        """Return one value per token; None where there is none."""
        spread: list[float | None] = [None] * length
        for position, value in zip(self.positions.tolist(), self.values.tolist(), strict=True):
            if 0 <= position < length:
                spread[position] = value
        return spread


class StoredSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A `TokenSequence` whose lists are little-endian arrays."""

    spans: list[MessageSpan] = []
    number: int | None = None  # of the sequence in its batch; None: it is in none
    token_ids: bytes  # int32
    trained: bytes  # bool
    versions: bytes  # int32; -1: not sampled
    logprobs: bytes  # float32
    ref_logprobs: bytes | None = None  # float32
    advantages: bytes | None = None  # float32; NaN: none

    def shown(self, pieces: Mapping[int, str], trainer: Mapping[int, Logprobs]) -> TokenSequence:
        """Return the sequence as readers show it, with the trainer's log-probabilities by number of the sequence.

        Raise DamagedFileError.
        """
        length = len(self.token_ids) // 4
        known = None if self.number is None else trainer.get(self.number)
        token_ids = _array(self.token_ids, "<i4", length).tolist()
        versions = _array(self.versions, "<i4", length)
        sampled = versions >= 0
        return TokenSequence(
            spans=self.spans,
            token_ids=token_ids,
            pieces=[pieces.get(token, "") for token in token_ids] if pieces else [],
            sampled=sampled.tolist(),
            trained=_array(self.trained, "?", length).tolist(),
            versions=[version if version >= 0 else None for version in versions.tolist()],
            logprobs=_floats(self.logprobs, sampled),
            trainer_logprobs=None if known is None else known.spread(length),
            ref_logprobs=None if self.ref_logprobs is None else _floats(self.ref_logprobs, sampled),
            advantages=None if self.advantages is None else _floats(self.advantages),
        )


class StoredConversation(msgspec.Struct, frozen=True, kw_only=True):
    """An `AgentConversation` with stored sequences."""

    agent: str
    reward: float | None
    messages: list[Message] = []
    tools: list[str] = []
    sequences: list[StoredSequence] = []


class StoredRollout(msgspec.Struct, frozen=True):
    """A rollout as it is on disk, without its summary."""

    conversations: list[StoredConversation] = []
    pieces: dict[int, str] = {}  # text of each token id that occurs

    def shown(self, summary: RolloutSummary, trainer: Mapping[int, Logprobs]) -> RolloutTranscript:
        """Return the rollout as readers show it. Raise DamagedFileError. `trainer`: see `StoredSequence.shown`."""
        conversations = [
            AgentConversation(
                **msgspec.structs.asdict(each)
                | {"sequences": [sequence.shown(self.pieces, trainer) for sequence in each.sequences]}
            )
            for each in self.conversations
        ]
        return RolloutTranscript(summary=summary, conversations=conversations)


class _RankLogprobs(msgspec.Struct, frozen=True):
    """The trainer's log-probabilities that one rank has computed: by number of the sequence, int32 and float32."""

    sequences: dict[int, list[tuple[bytes, bytes]]]
    crc: int


def logprobs_stem(name: str) -> str:
    """Return the `FileName.stem` that a file of log-probabilities belongs to; empty for other files."""
    return name.partition("rank-")[0] if name.endswith(LOGPROBS_SUFFIX) else ""


def logprobs_path(run_dir: Path, step: int, attempt: int, rank: int) -> Path:
    """Return where a trainer rank writes the log-probabilities of kept rollouts of a step."""
    stem = FileName(step, attempt, "batch", 0).stem
    return run_dir / DIRECTORY / f"{stem}rank-{rank:05d}{LOGPROBS_SUFFIX}"


def encode_logprobs(values: Iterable[tuple[int, Any, Any]]) -> bytes:
    """Encode (number of the sequence, positions of tokens, their log-probabilities) of kept rollouts."""
    sequences: dict[int, list[tuple[bytes, bytes]]] = {}
    for number, positions, logprobs in values:
        pair = (np.ascontiguousarray(positions, "<i4").tobytes(), np.ascontiguousarray(logprobs, "<f4").tobytes())
        sequences.setdefault(number, []).append(pair)
    return msgspec.msgpack.encode(_RankLogprobs(sequences, zlib.crc32(msgspec.msgpack.encode(sequences))))


def read_logprobs(paths: Iterable[Path]) -> dict[int, Logprobs]:
    """Read the files of a step's ranks, by number of the sequence. Damaged and vanished files are left out."""
    sequences: dict[int, list[tuple[bytes, bytes]]] = {}
    for path in paths:
        try:
            decoded = _decoded(files.read_bytes(path), _LOGPROBS)
        except (OSError, DamagedFileError):
            continue
        if zlib.crc32(msgspec.msgpack.encode(decoded.sequences)) == decoded.crc:
            for number, pairs in decoded.sequences.items():  # ranks may share a sequence
                sequences.setdefault(number, []).extend(pairs)
    return {
        number: Logprobs(
            np.frombuffer(b"".join(positions for positions, _ in pairs), "<i4"),
            np.frombuffer(b"".join(values for _, values in pairs), "<f4"),
        )
        for number, pairs in sequences.items()
    }


# Made here, because msgspec inspects a type without a lock.
_HEADS = msgspec.msgpack.Decoder(_Head)
_LOGPROBS = msgspec.msgpack.Decoder(_RankLogprobs)
_ROLLOUTS = msgspec.msgpack.Decoder(StoredRollout)


def encode(rollouts: Sequence[tuple[RolloutSummary, StoredRollout]]) -> list[bytes | memoryview]:
    """Return the content of a file as chunks."""
    bodies: list[bytes | memoryview] = []
    places, offset = [], 0
    for _, rollout in rollouts:
        raw = msgspec.msgpack.encode(rollout)
        body = compress(raw)
        places.append(Place(offset, len(body), len(raw), zlib.crc32(body)))
        bodies.append(body)
        offset += len(body)
    raw = msgspec.msgpack.encode(_Head([summary for summary, _ in rollouts], places))
    head = compress(raw)
    return [MAGIC, _SIZES.pack(len(raw), len(head), zlib.crc32(head)), head, *bodies]


class ArchiveFile(NamedTuple):
    """A file whose head was read. The head stays encoded, because a long run has a hundred thousand summaries."""

    path: Path
    head: bytes
    begin: int  # where the rollouts begin in the file [bytes]

    def summaries(self) -> list[RolloutSummary]:
        """Decode the summaries. Raise DamagedFileError."""
        return _decoded(self.head, _HEADS).summaries

    def read(self, id: str, trainer: Iterable[Path]) -> RolloutTranscript:
        """Read one rollout, with log-probabilities from files of trainer ranks. Raise DamagedFileError, or OSError."""
        head = _decoded(self.head, _HEADS)
        index = [summary.id for summary in head.summaries].index(id)
        place = head.places[index]

        def read(file: BinaryIO) -> bytes:
            return _read_exactly(file, self.begin + place.offset, place.size)

        body = files.reading(self.path, read)
        if len(body) != place.size or zlib.crc32(body) != place.crc:
            raise DamagedFileError("its place in the file is damaged")
        stored = _decoded(decompress(body, place.raw_size), _ROLLOUTS)
        return stored.shown(head.summaries[index], read_logprobs(trainer))


def open_file(path: Path) -> ArchiveFile:
    """Read and check the head of a file. Raise DamagedFileError, or OSError."""

    def read(file: BinaryIO) -> tuple[bytes, int, int]:
        first = file.read(_FIRST_READ_BYTES)
        start = len(MAGIC) + _SIZES.size
        if len(first) < start or not first.startswith(MAGIC):
            raise DamagedFileError("it does not begin like a file of the archive")
        raw_size, size, crc = _SIZES.unpack_from(first, len(MAGIC))
        if start + size > os.fstat(file.fileno()).st_size:
            raise DamagedFileError("it ends in its head")
        head = first[start : start + size]
        if len(head) < size:
            head += _read_exactly(file, start + len(head), size - len(head))
        if len(head) != size or zlib.crc32(head) != crc:
            raise DamagedFileError("its head is damaged")
        return head, raw_size, start + size

    head, raw_size, begin = files.reading(path, read)
    return ArchiveFile(path, decompress(head, raw_size), begin)


def compress(data: bytes) -> bytes:
    return bytes(_pyarrow().compress(data, codec="zstd", asbytes=True))


def decompress(data: bytes, size: int) -> bytes:
    """Decompress `size` bytes. Raise DamagedFileError."""
    if size > LARGEST_BYTES:
        raise DamagedFileError(f"{size} bytes are more than {LARGEST_BYTES}")
    if not size:
        return b""
    try:
        return bytes(_pyarrow().decompress(data, decompressed_size=size, codec="zstd", asbytes=True))
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"it cannot be decompressed: {error}") from error


def _pyarrow() -> Any:
    """Import pyarrow, which has zstd. Only commands that read rollouts need it."""
    try:
        import pyarrow
    except ImportError as error:
        raise RunError("kept rollouts cannot be read without pyarrow (pip install pyarrow)") from error
    return pyarrow


def _floats(data: bytes, mask: Any = None) -> list[float | None]:
    """Return float32 values, with None where they are NaN or the mask is false."""
    values = _array(data, "<f4", len(data) // 4 if mask is None else len(mask))
    shown = ~np.isnan(values) if mask is None else mask & ~np.isnan(values)
    return [value if is_shown else None for value, is_shown in zip(values.tolist(), shown.tolist(), strict=True)]


def _array(data: bytes, dtype: str, length: int) -> Any:
    array = np.frombuffer(data, dtype) if len(data) == length * np.dtype(dtype).itemsize else None
    if array is None:
        raise DamagedFileError("its arrays differ in length")
    return array


def _decoded(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(data)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedFileError(f"{type(error).__name__}: {error}") from error


def _read_exactly(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    chunks = []
    while size and (chunk := file.read(size)):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
