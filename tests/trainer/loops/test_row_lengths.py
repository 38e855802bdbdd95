"""Rows without padding, and joined rows, train like padded rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.training_speed import joined
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components.lora import whole
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.batch import Batch, Row
from tests.trainer.conftest import SEQ_LEN, make_batch, make_recipe, make_timer


def without_padding(row: Row) -> Row:
    """`make_row` ends with an untrained document, like padding."""
    end = int(np.flatnonzero(row.positions == 0)[-1])
    return replace(row, **{name: array[:end] for name, array in row.arrays().items()})


def test_short_rows_train_like_padded_rows(moe_model: Path, world: World, tmp_path: Path) -> None:
    recipe = make_recipe(moe_model, trainer={"router_replay": True})
    actual = []
    for shortened in (False, True):
        policy = build(recipe, world)
        train_step = TrainStep(policy, recipe, world)
        plain = make_batch(1, routed=True)
        info = msgspec.structs.replace(plain.info, rows_at_once=1)
        rows = [without_padding(row) if shortened and i % 2 else row for i, row in enumerate(plain.rows)]
        assert len({len(row.token_ids) for row in rows}) == 1 + shortened
        again = Batch.decode([bytearray(frame) for frame in Batch(info, rows).encode()])
        actual.append(train_step.train(again, make_timer(tmp_path)))
    padded, short = actual
    for name in ("loss", "off_policy_kl", "mismatch_kl", "entropy", "masked_fraction", "grad_norm"):
        assert short[name] == pytest.approx(padded[name], rel=1e-5, abs=1e-7), name


def test_joined_rows_have_the_gradients_of_stacked_rows(moe_model: Path, world: World) -> None:
    recipe = make_recipe(moe_model, trainer={"router_replay": True, "micro_batch_tokens": 3 * SEQ_LEN})
    batch = make_batch(1, routed=True)  # micro batches of three rows and one
    long, *short = batch.rows[0], *map(without_padding, batch.rows[1:])
    gradients = []
    for rows in (batch, joined(Batch(batch.info, [*short, long]), 4), joined(Batch(batch.info, [*short, long]), 2)):
        policy = build(recipe, world)
        TrainStep(policy, recipe, world)._accumulate(rows, batch.info.loss_tokens)
        gradients.append({name: whole(parameter.grad) for name, parameter in policy.model.named_parameters()})
    for actual in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(actual[name], gradient, rtol=0, atol=5e-6 * float(gradient.abs().max()))
