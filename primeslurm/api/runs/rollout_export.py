"""Exports rollouts as JSON lines or as Parquet, for other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from primeslurm.base import files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.files import write_atomic
from primeslurm.records.rollouts import AgentConversation, RolloutSummary, RolloutTranscript, TokenSequence

SUFFIXES = (".jsonl", ".parquet")
# Rollouts that are in memory at once.
_GROUP = 32


def export_problems(path: Path) -> list[Violation]:
    """Return why rollouts cannot be exported to a path, as far as the path tells."""
    if path.suffix not in SUFFIXES:
        return [Violation("--export", str(path), "has an unknown format", "end it in .jsonl or .parquet")]
    return []


def export_rollouts(read: Callable[[], Iterable[RolloutTranscript]], path: Path) -> int:
    """Write rollouts to a file, each with all of its messages and tokens. Return their number.

    Args:
        read: returns the rollouts; called once for each try.

    Raises:
        UsageError: the file cannot be written.
    """
    exported = 0

    def counted() -> Iterator[RolloutTranscript]:
        nonlocal exported
        exported = 0
        for transcript in read():
            exported += 1
            yield transcript

    try:
        files.require_replaceable(path)
        if path.suffix == ".jsonl":
            write_atomic(path, lambda: (msgspec.json.encode(each) + b"\n" for each in counted()))
        else:
            _write_parquet(path, counted())
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        raise UsageError([Violation("--export", str(path), why)]) from None
    return exported


def _write_parquet(path: Path, rollouts: Iterator[RolloutTranscript]) -> None:
    import pyarrow
    from pyarrow import parquet

    schema = _schema()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
            while group := list(islice(rollouts, _GROUP)):
                writer.write_table(pyarrow.Table.from_pylist([_row(each) for each in group], schema=schema))
        files.rename(temporary, path)
    finally:
        files.unlink(temporary)


def _row(rollout: RolloutTranscript) -> dict[str, Any]:
    fields = msgspec.to_builtins(rollout)
    row: dict[str, Any] = fields["summary"] | {"conversations": fields["conversations"]}
    return row | {name: list(row[name].items()) for name in ("reward_parts", "metrics")}


def _schema() -> Any:
    """Return the same columns for every export: those of `RolloutSummary`, and `conversations`."""
    import pyarrow as pa

    conversations = _arrow_type(inspect.type_info(list[AgentConversation]))
    return pa.schema([*_arrow_type(inspect.type_info(RolloutSummary)), ("conversations", conversations)])


def _arrow_type(kind: Any, *, narrow: bool = False) -> Any:
    """Return the Arrow type of a record's field. Numbers of token sequences have 32 bits (`narrow`), others 64."""
    import pyarrow as pa

    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return pa.struct([(each.name, _arrow_type(each.type, narrow=cls is TokenSequence)) for each in fields])
        case inspect.ListType(item_type=item):
            return pa.list_(_arrow_type(item, narrow=narrow))
        case inspect.DictType(key_type=key, value_type=value):
            return pa.map_(_arrow_type(key), _arrow_type(value))
        case inspect.UnionType(types=types):  # with None, because Arrow's fields may be null
            return _arrow_type(next(each for each in types if not isinstance(each, inspect.NoneType)), narrow=narrow)
        case inspect.IntType():
            return pa.int32() if narrow else pa.int64()
        case inspect.FloatType():
            return pa.float32() if narrow else pa.float64()
        case inspect.BoolType():
            return pa.bool_()
    return pa.string()
