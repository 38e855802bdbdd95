"""Observed tokens and teacher log-probabilities, from the batch to the metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from primeslurm.recipe.sections.losses import DppoLoss
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components.loss import from_recipe
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.batch import Batch
from tests.trainer.conftest import make_batch, make_recipe, make_timer


def test_observed_tokens_are_trained(dense_model: Path, world: World, tmp_path: Path) -> None:
    recipe = make_recipe(dense_model)
    policy = build(recipe, world)
    plain = make_batch(1)
    rows = []
    for row in plain.rows:
        observed = ~row.mask & (np.arange(len(row.mask)) % 3 == 0)
        weights = np.where(observed, 0.25, 0).astype(np.float32)
        rows.append(replace(row, echo_weights=weights, temperatures=np.where(observed, 1, row.temperatures)))
    expected = 0.0
    for row in rows:
        tokens, positions = (torch.from_numpy(array).long()[None] for array in (row.token_ids, row.positions))
        with torch.no_grad():
            logprobs = policy.logits(tokens, positions)[0].log_softmax(-1)
        nll = -logprobs[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()
        trained = row.positions[1:] > 0  # a document's first token never is
        expected += float((row.echo_weights[1:] * nll)[trained].sum())

    train_step = TrainStep(policy, recipe, world, loss=from_recipe(DppoLoss()))
    metrics = train_step.train(Batch(plain.info, rows), make_timer(tmp_path))
    assert metrics["echo_loss"] == pytest.approx(expected / plain.info.loss_tokens, rel=1e-4)
    assert metrics["entropy"] > 1, "of sampled tokens alone"


def test_teacher_logprobs_are_aligned_with_their_tokens(dense_model: Path, world: World, tmp_path: Path) -> None:
    """A teacher with half the policy's probability gives terms of known size."""
    recipe = make_recipe(dense_model)
    policy = build(recipe, world)
    plain = make_batch(1)
    rows, ratios = [], []
    for row in plain.rows:
        tokens, positions = (torch.from_numpy(array).long()[None] for array in (row.token_ids, row.positions))
        with torch.no_grad():
            logits = policy.logits(tokens, positions)[0] / torch.from_numpy(row.temperatures).roll(-1)[None, :, None]
        own = np.zeros(len(row.mask), np.float32)
        own[1:] = logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()
        rows.append(replace(row, ref_logprobs=np.where(row.mask, own - np.float32(np.log(2)), 0).astype(np.float32)))
        ratios.append(np.exp(own - row.logprobs)[row.mask & (row.positions > 0)])
    loss = from_recipe(DppoLoss(ref_kl=0.5))
    train_step = TrainStep(policy, recipe, world, loss=loss)
    metrics = train_step.train(Batch(plain.info, rows), make_timer(tmp_path))
    expected = np.concatenate(ratios).sum() * (0.5 - 1 + np.log(2)) / plain.info.loss_tokens
    assert metrics["ref_kl"] == pytest.approx(expected, rel=1e-3)
