"""SFT data: JSONL conversations to token rows, in an order that depends only on the seed and the step."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from primeslurm.wire.rollouts import Batch, BatchInfo, Bool, Int32, Row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """One tokenized conversation; `mask` marks the tokens of the completion. Both have shape [n_tokens]."""

    token_ids: Int32
    mask: Bool


def load(path: Path, tokenizer: Any, seq_len: int) -> list[Example]:
    """Read {"messages": [...]} (the last message is trained) or {"prompt", "completion"}, one a line.

    Examples longer than `seq_len` are left out, and counted in the log.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is neither form, or no example is left.
    """
    examples = []
    too_long = 0
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            example = _tokenize(json.loads(line), tokenizer)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
        if len(example.token_ids) > seq_len:
            too_long += 1
        else:
            examples.append(example)
    if too_long:
        log.warning("%s: left out %d examples of more than %d tokens", path, too_long, seq_len)
    if not examples:
        raise ValueError(f"{path}: no example of at most {seq_len} tokens")
    return examples


def batch(
    examples: Sequence[Example], step: int, batch_size: int, seq_len: int, seed: int, dp_rank: int, dp_world: int
) -> Batch:
    """The rows of one rank for `step` (first step: 1). Every rank gets the same number of rows."""
    chosen = [examples[i] for i in _indices(len(examples), (step - 1) * batch_size, batch_size, seed)]
    rows = [_row(documents, seq_len) for documents in _pack(chosen, seq_len)]
    while len(rows) % dp_world:
        rows.append(_row([], seq_len))
    # A document's first token is never trained, so it does not count.
    tokens = sum(int(example.mask[1:].sum()) for example in chosen)
    info = BatchInfo(step=step, dp_rank=dp_rank, dp_world=dp_world, loss_tokens=tokens)
    return Batch(info, rows[dp_rank::dp_world])


def _tokenize(record: dict[str, Any], tokenizer: Any) -> Example:
    if "messages" in record:
        messages = record["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        if not text.startswith(prompt):
            raise ValueError("the chat template does not render the prompt as the beginning of the conversation")
        completion = text.removeprefix(prompt)
        # An engine stops at the end-of-sequence token, so nothing after it is ever sampled.
        completion = completion[: completion.rfind(tokenizer.eos_token) + len(tokenizer.eos_token)] or completion
    else:
        prompt, completion = record["prompt"], record["completion"] + tokenizer.eos_token
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    completion_ids = tokenizer.encode(completion, add_special_tokens=False)
    mask = [False] * len(prompt_ids) + [True] * len(completion_ids)
    return Example(np.asarray(prompt_ids + completion_ids, np.int32), np.asarray(mask))


def _indices(count: int, start: int, size: int, seed: int) -> Iterator[int]:
    """Positions `start`, ... of an endless stream that shuffles all examples anew every epoch."""
    orders: dict[int, Any] = {}
    for position in range(start, start + size):
        epoch, offset = divmod(position, count)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(count)
        yield int(orders[epoch][offset])


def _pack(examples: Sequence[Example], seq_len: int) -> list[list[Example]]:
    rows: list[list[Example]] = [[]]
    used = 0
    for example in examples:
        if used + len(example.token_ids) > seq_len:
            rows.append([])
            used = 0
        rows[-1].append(example)
        used += len(example.token_ids)
    return rows


def _row(documents: Sequence[Example], seq_len: int) -> Row:
    padding = seq_len - sum(len(d.token_ids) for d in documents)
    lengths = [*(len(d.token_ids) for d in documents), padding]
    empty = np.zeros(padding, np.int32)
    return Row(
        token_ids=np.concatenate([*(d.token_ids for d in documents), empty]),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        mask=np.concatenate([*(d.mask for d in documents), empty.astype(bool)]),
        logprobs=np.zeros(seq_len, np.float32),
        advantages=np.zeros(seq_len, np.float32),
        temperatures=np.ones(seq_len, np.float32),
        on_policy=np.zeros(seq_len, np.bool_),
    )
