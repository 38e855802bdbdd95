"""Exports rollouts as JSON lines or as Parquet, for other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from primeslurm.base import files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.files import write_atomic
from primeslurm.records.rollouts import RolloutTranscript

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

    integer, real, text, flag = pa.int64(), pa.float64(), pa.string(), pa.bool_()
    numbers = pa.map_(text, real)
    call = pa.struct({"id": text, "name": text, "arguments": text})
    message = pa.struct(
        {
            "role": text,
            "content": text,
            "reasoning": text,
            "tool_calls": pa.list_(call),
            "tool_call_id": text,
            "name": text,
            "sampled": flag,
            "images": integer,
            "omitted": integer,
            "started_s": real,
            "ended_s": real,
        }
    )
    span = pa.struct({"message": integer, "start": integer, "end": integer})
    sequence = pa.struct(
        {
            "spans": pa.list_(span),
            "token_ids": pa.list_(pa.int32()),
            "pieces": pa.list_(text),
            "sampled": pa.list_(flag),
            "trained": pa.list_(flag),
            "versions": pa.list_(pa.int32()),
            "logprobs": pa.list_(pa.float32()),
            "trainer_logprobs": pa.list_(pa.float32()),
            "ref_logprobs": pa.list_(pa.float32()),
            "advantages": pa.list_(pa.float32()),
        }
    )
    conversation = {"agent": text, "reward": real, "messages": pa.list_(message), "tools": pa.list_(text)}
    columns = {
        "id": text,
        "group": text,
        "environment": text,
        "state": text,
        "step": integer,
        "attempt": integer,
        "example": integer,
        "task": integer,
        "agents": pa.list_(text),
        "reward": real,
        "length_penalty": real,
        "reward_parts": numbers,
        "metrics": numbers,
        "advantage": real,
        "opened_version": integer,
        "oldest_version": integer,
        "newest_version": integer,
        "staleness": integer,
        "truncated": flag,
        "evaluation": flag,
        "error": text,
        "dropped": text,
        "tokens": integer,
        "sampled_tokens": integer,
        "trained_tokens": integer,
        "turns": integer,
        "seconds": real,
        "time": real,
        "finish_reason": text,
        "conversations": pa.list_(pa.struct(conversation | {"sequences": pa.list_(sequence)})),
    }
    return pa.schema(columns)
