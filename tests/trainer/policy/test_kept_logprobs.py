"""The archive shows, for every trained token of a kept rollout, the log-probability that the trainer computed."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from primeslurm.base import durable
from primeslurm.base.files import Content
from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.records import rollout_files
from primeslurm.run.rollouts.archive import RolloutArchive
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.kept_logprobs import KeptLogprobs
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.batch import BatchInfo, KeptDocument
from tests.trainer.conftest import make_recipe, make_timer
from tests.trainer.loops.test_losses_learn import GROUPS, MEMBERS, batch_of, sample


def named(group: RolloutGroup) -> RolloutGroup:
    """Give each rollout an id of its own."""
    rollouts = tuple(
        tuple(replace(each, info=msgspec.structs.replace(each.info, id=f"{group.id}/{index}")) for each in rollout)
        for index, rollout in enumerate(group.rollouts)
    )
    return replace(group, rollouts=rollouts)


def written(kept: KeptLogprobs, recorder: RolloutRecorder) -> None:
    """Wait until both threads have written."""
    kept._thread.submit(lambda: None).result(60)
    recorder._thread.submit(lambda: None).result(60)


def test_trainer_and_engine_agree_on_a_policy_that_samples_its_own_batch(
    dense_model: Path, world: World, tmp_path: Path
) -> None:
    recipe = make_recipe(dense_model, orchestrator={"batch_size": GROUPS * MEMBERS, "group_size": MEMBERS})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = build(recipe, world)
    kept = KeptLogprobs(tmp_path, 1, world.rank)
    train_step = TrainStep(policy, recipe, world, kept=kept)
    recorder = RolloutRecorder(tmp_path, 1, recipe.monitor.rollouts, lambda: 1)
    batches = Batches(recipe, algorithms.from_recipe(recipe), recorder=recorder)
    groups = [named(group) for group in sample(policy, np.random.default_rng(0))]
    batches.add(1, groups)
    batch = batch_of(batches, 1)
    assert batch is not None
    archive = RolloutArchive(tmp_path)
    recorder._thread.submit(lambda: None).result(60)
    first = archive.page().rollouts[0].id
    assert archive.get(first).conversations[0].sequences[0].trainer_logprobs is None, "the step is not trained yet"
    train_step.train(batch, make_timer(tmp_path))
    written(kept, recorder)

    rollouts = list(archive.transcripts())
    assert len(rollouts) == min(recipe.monitor.rollouts.per_step, GROUPS * MEMBERS)
    originals = {each.info.id: each for group in groups for each in group.sequences}
    for rollout in rollouts:
        (sequence,) = rollout.conversations[0].sequences
        trainer = sequence.trainer_logprobs
        assert trainer is not None and [value is not None for value in trainer] == sequence.trained
        original = originals[rollout.summary.id]
        assert sequence.token_ids == original.token_ids.tolist() and sequence.trained == original.mask.tolist()
        shown = [value for value in trainer if value is not None]
        assert shown == pytest.approx(original.logprobs[original.mask].tolist(), abs=1e-3)
    recorder.close()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_of_rows_together_have_every_token(ranks: int, tmp_path: Path) -> None:
    """Rows of 16 tokens: one with documents of 5 and 9 tokens, one with a document of 12."""
    documents = (KeptDocument(7, 0, 5, 9), KeptDocument(3, 1, 0, 12))
    trained = np.zeros((2, 17), bool)
    trained[0, 1:5] = trained[0, 7:14] = trained[1, 2:12:2] = True
    # The value of a token is 100 times its row plus its position. A position predicts the token after it.
    length = 16 // ranks
    for rank in range(ranks):
        kept = KeptLogprobs(tmp_path, 1, rank)
        info = BatchInfo(4, 0, 1, 9, cp_rank=rank, cp_world=ranks, kept=documents)
        for row in range(2):  # micro batches of one row
            predicts = trained[row, 1 + rank * length : 1 + (rank + 1) * length]
            values = 100.0 * row + 1 + rank * length + np.flatnonzero(predicts)
            kept.add(info, row, torch.from_numpy(predicts[None]), torch.from_numpy(values).requires_grad_())
        kept.write(4)
        kept._thread.submit(lambda: None).result(60)
    found = rollout_files.read_logprobs((tmp_path / rollout_files.DIRECTORY).iterdir())
    assert found[7].spread(9) == [None, None, *(float(token) for token in range(7, 14))]
    assert found[3].spread(12) == [None, None, 102.0, None, 104.0, None, 106.0, None, 108.0, None, 110.0, None]


def test_full_disk_does_not_disturb_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: Content) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(durable, "write", full)
    kept = KeptLogprobs(tmp_path, 1, 0)
    info = BatchInfo(4, 0, 1, 9, kept=(KeptDocument(0, 0, 0, 4), KeptDocument(1, 5, 0, 4)))
    kept.add(info, 0, torch.ones(1, 4, dtype=torch.bool), torch.zeros(4))
    kept.write(4)
    kept._thread.submit(lambda: None).result(60)
    assert list((tmp_path / rollout_files.DIRECTORY).iterdir()) == []


def test_damaged_file_makes_log_probabilities_unknown(tmp_path: Path) -> None:
    path = tmp_path / "x.logprobs"
    whole = rollout_files.encode_logprobs([(1, np.arange(4), np.ones(4))])
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert rollout_files.read_logprobs([path]) == {}
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0xFF]) + whole[index + 1 :])
        for _, (positions, values) in rollout_files.read_logprobs([path]).items():
            assert positions.tolist() == [0, 1, 2, 3] and values.tolist() == [1.0] * 4
    path.unlink()
    assert rollout_files.read_logprobs([path]) == {}
