"""Tokenized conversations in the run directory: made once, and the same for any number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from primeslurm.trainer.data import token_files
from primeslurm.trainer.data.sft_data import Conversations, Example, ExampleList
from primeslurm.trainer.distributed.world import RankError, World
from scripts.models import tiny_model
from tests.support.conversations_read import loaded
from tests.trainer.conftest import SEQ_LEN

LONG = {"prompt": "x" * 2 * SEQ_LEN, "completion": "y"}
SEPARATED = {"prompt": "a\u2028b", "completion": "cd"}
"""A Unicode line separator, which JSON does not escape, does not end a line."""


class Untouched:
    """A tokenizer that must not be called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the tokenizer is asked for {name}")


def conversations(directory: Path, model: Path, *lines: dict[str, Any]) -> Conversations:
    path = directory / "data.jsonl"
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    return Conversations(path, AutoTokenizer.from_pretrained(model), SEQ_LEN)


def lines(count: int) -> list[dict[str, Any]]:
    chats: list[dict[str, Any]] = list(tiny_model.demonstrations(count, 0.0, 0))
    return [*chats[: count // 2], LONG, SEPARATED, *chats[count // 2 :]]


def same(actual: ExampleList, wanted: Sequence[Example]) -> bool:
    pairs = [(actual[i], each) for i, each in enumerate(wanted)]
    return len(actual) == len(wanted) and all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.mask, b.mask) for a, b in pairs
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 400])
def test_any_number_of_ranks_makes_the_same_examples(ranks: int, moe_model: Path, tmp_path: Path) -> None:
    it = conversations(tmp_path, moe_model, *lines(20))
    wanted = loaded(it)
    assert len(wanted) == 21
    parts = tuple(token_files.write_part(tmp_path, it, rank, ranks) for rank in range(ranks))
    assert (sum(part.examples for part in parts), sum(part.too_long for part in parts)) == (21, 1)
    assert same(token_files.TokenFiles(tmp_path, parts), wanted)


def test_tokens_are_made_once_for_the_same_inputs(moe_model: Path, world: World, tmp_path: Path) -> None:
    it = conversations(tmp_path, moe_model, *lines(6))
    run = tmp_path / "run"
    run.mkdir()
    wanted = loaded(it)
    assert same(token_files.tokenized(run, it, moe_model, world), wanted)
    known = Conversations(it.path, Untouched(), SEQ_LEN)
    assert same(token_files.tokenized(run, known, moe_model, world), wanted), "a later attempt"
    for other in (
        Conversations(it.path, Untouched(), SEQ_LEN + 1),
        Conversations(it.path, Untouched(), SEQ_LEN, every=True),
    ):
        with pytest.raises(RankError, match="the tokenizer is asked for"):
            token_files.tokenized(run, other, moe_model, world)


@pytest.mark.parametrize("harm", ["changed", "cut", "killed"])
def test_incomplete_files_are_made_again(harm: str, moe_model: Path, world: World, tmp_path: Path) -> None:
    it = conversations(tmp_path, moe_model, *lines(6))
    run = tmp_path / "run"
    run.mkdir()
    token_files.tokenized(run, it, moe_model, world)
    if harm == "changed":
        it = conversations(tmp_path, moe_model, *lines(8))
        os.utime(it.path, (1, 1))
    elif harm == "cut":
        os.truncate(run / "tokens" / "00000.tokens", 4)
    else:
        (run / "tokens" / "record.json").unlink()
    assert same(token_files.tokenized(run, it, moe_model, world), loaded(it))
    token_files.remove(run)
    assert list(run.iterdir()) == []


def test_invalid_data_is_named(moe_model: Path, world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    it = conversations(tmp_path, moe_model, *lines(2), {"text": "x"})
    with pytest.raises(RankError, match=r"rank 0: .*data\.jsonl, line 9: has text, but neither `messages` nor"):
        token_files.tokenized(run, it, moe_model, world)
    with pytest.raises(RankError, match=rf"data\.jsonl: no example of at most {SEQ_LEN} tokens"):
        token_files.tokenized(run, conversations(tmp_path, moe_model, LONG), moe_model, world)
    assert not (run / "tokens" / "record.json").exists()
    it.path.unlink()
    with pytest.raises(RankError, match=r"tokenizing the data failed: rank 0: .*No such file"):
        token_files.tokenized(run, it, moe_model, world)
