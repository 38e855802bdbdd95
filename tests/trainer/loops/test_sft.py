"""SFT: data, learning, checkpoints and published weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from primeslurm.recipe import Recipe
from primeslurm.records.journal import Journal
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.data import sft_data, token_files
from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.loops.sft import SftTask
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.weight_transfer import filesystem
from scripts.models import tiny_model
from tests.support.conversations_read import loaded
from tests.trainer.conftest import SEQ_LEN, finish, make_recipe, published, start_ranks, trainer_command


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "reverse.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in tiny_model.demonstrations(64, 0.0, 0)))
    return path


def sft_recipe(model: Path, demonstrations: Path, /, **sections: Any) -> Recipe:
    """The learning rate is constant, so that a resumed run matches an uninterrupted one."""
    sft = {"data": {"path": str(demonstrations)}, "batch_size": 8}
    base: dict[str, Any] = {"task": "sft", "sft": sft, "environments": [], "monitor": {"tensorboard": False}}
    return make_recipe(model, **(base | sections))


def train(
    recipe: Recipe, run_dir: Path, world: World, attempt: int = 1, reader: ImageReader | None = None
) -> list[dict[str, float]]:
    """Run SFT in this process. Return metrics.jsonl."""
    assert recipe.sft is not None
    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world, reader)
    publisher = Publisher(policy, run_dir, Encoding(torch.float32), recipe.weights.keep, world)
    saver = Checkpoints(run_dir, attempt, recipe.checkpoint, world, None)
    tokenizer = AutoTokenizer.from_pretrained(policy.source)
    conversations = sft_data.Conversations(Path(recipe.sft.data.path), tokenizer, recipe.seq_len, reader)
    examples = token_files.tokenized(run_dir, conversations, policy.source, world)
    journal = Journal(run_dir / "attempts" / str(attempt), "trainer-rank-0")
    assert SftTask(recipe, run_dir, 1, train_step, publisher, saver, world, examples, journal).run() == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_superseded_trainer_writes_no_metrics(
    moe_model: Path, demonstrations: Path, world: World, tmp_path: Path
) -> None:
    class TakenOver(Checkpoints):
        def after(self, step: int, train_step: TrainStep, timer: PhaseTimer) -> None:
            super().after(step, train_step, timer)
            (tmp_path / "attempts" / "2").mkdir(exist_ok=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.__globals__, "Checkpoints", TakenOver)
        with pytest.raises(OSError, match="attempt 2 has taken over the run from attempt 1"):
            train(sft_recipe(moe_model, demonstrations), tmp_path, world)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1]


def test_only_the_completion_is_trained(moe_model: Path, demonstrations: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(moe_model)
    example = loaded(sft_data.Conversations(demonstrations, tokenizer, SEQ_LEN))[0]
    chat = json.loads(demonstrations.read_text().splitlines()[0])["messages"]
    assert tokenizer.decode(example.token_ids[example.mask]) == chat[1]["content"] + "<|im_end|>"
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(example.token_ids[~example.mask]) == prompt


def test_prompt_and_completion_lines_are_read(moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "ab", "completion": "cd"}\n\n{"prompt": "' + "x" * 99 + '", "completion": "y"}\n')
    tokenizer = AutoTokenizer.from_pretrained(moe_model)
    (example,) = loaded(sft_data.Conversations(path, tokenizer, SEQ_LEN))
    assert tokenizer.decode(example.token_ids) == "abcd<|im_end|>"
    assert example.mask.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("line", ["not json", '{"text": "x"}', "[]"])
def test_bad_line_is_named(line: str, moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "ab", "completion": "cd"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2"):
        loaded(sft_data.Conversations(path, AutoTokenizer.from_pretrained(moe_model), SEQ_LEN))


def test_batches_cover_every_example_once_per_epoch() -> None:
    examples = [
        sft_data.Example(np.full(5, i, np.int32), np.array([False, False, True, True, True])) for i in range(12)
    ]
    for dp_world in (1, 2, 3):
        seen: list[int] = []
        for step in (1, 2, 3):
            shares = [sft_data.batch(examples, step, 4, 16, 0, rank, dp_world) for rank in range(dp_world)]
            assert len({len(share.rows) for share in shares}) == 1
            assert {share.info.loss_tokens for share in shares} == {12}
            for row in (row for share in shares for row in share.rows):
                assert len(row.token_ids) == 16 and row.positions[0] == 0
                seen += row.token_ids[row.mask][::3].tolist()
        assert sorted(seen) == list(range(12))


def test_rows_are_full() -> None:
    """With lengths of real conversations, packing in file order would leave a third of the rows as padding."""
    lengths = np.random.default_rng(0).integers(1, 4096, 512)
    examples = [sft_data.Example(np.full(n, i, np.int32), np.ones(n, bool)) for i, n in enumerate(lengths)]
    rows = sft_data.batch(examples, 1, len(examples), 4096, 0, 0, 1).rows
    assert len(rows) <= 1.05 * sum(lengths) / 4096
    trained = [row.token_ids[row.mask] for row in rows]
    actual = dict(zip(*np.unique(np.concatenate(trained), return_counts=True), strict=True))
    assert actual == dict(enumerate(lengths)), "each example is in one row, whole"


def test_joined_rows_are_micro_batches_without_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 64, 300)
    examples = [sft_data.Example(np.full(n, i + 1, np.int32), np.ones(n, bool)) for i, n in enumerate(lengths)]
    ranks = [sft_data.batch(examples, 1, len(examples), 64, 0, rank, 2, joined=32) for rank in range(2)]
    assert {(batch.info.rows_at_once, len(batch.rows)) for batch in ranks} == {(1, 3)}
    rows = [row for batch in ranks for row in batch.rows]
    assert all(len(row.token_ids) % 64 == 0 and row.positions.max() < 64 for row in rows)
    assert max(len(row.token_ids) for row in rows) <= 32 * 64
    actual = np.concatenate([row.token_ids for row in rows])
    assert np.bincount(actual)[1:].tolist() == lengths.tolist()


def test_the_loss_falls(moe_model: Path, demonstrations: Path, world: World, tmp_path: Path) -> None:
    recipe = sft_recipe(moe_model, demonstrations, max_steps=20, trainer={"optimizer": {"lr": 5e-3}})
    metrics = train(recipe, tmp_path, world)
    assert [m["step"] for m in metrics] == list(range(1, 21))
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    assert filesystem.published(tmp_path) == [20]


def test_resumed_run_matches_uninterrupted_run(
    moe_model: Path, demonstrations: Path, world: World, tmp_path: Path
) -> None:
    whole = train(sft_recipe(moe_model, demonstrations, max_steps=4), tmp_path / "whole", world)
    parts = tmp_path / "parts"
    train(sft_recipe(moe_model, demonstrations, max_steps=2), parts, world)
    with (parts / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 3, "lo')  # killed in the middle of a line
    resumed = train(sft_recipe(moe_model, demonstrations, max_steps=4), parts, world, attempt=2)
    assert [(m["step"], m["loss"], m["grad_norm"]) for m in resumed] == [
        (m["step"], m["loss"], m["grad_norm"]) for m in whole
    ]
    expected = published(tmp_path / "whole", 4)
    for name, tensor in published(parts, 4).items():
        assert torch.equal(tensor, expected[name]), name


def test_damaged_checkpoint_falls_back_to_the_previous_one(
    moe_model: Path, demonstrations: Path, world: World, tmp_path: Path
) -> None:
    recipe = sft_recipe(moe_model, demonstrations, max_steps=4, checkpoint={"interval": 2})
    before = train(recipe, tmp_path, world)
    (checkpoints.step_dir(tmp_path, 4) / "trainer" / ".metadata").write_bytes(b"damage")
    after = train(recipe, tmp_path, world, attempt=2)
    assert [(m["step"], m["loss"]) for m in after] == [(m["step"], m["loss"]) for m in before]
    record = checkpoints.read_commit(checkpoints.step_dir(tmp_path, 4))
    assert record is not None and record.attempt == 2
    assert (tmp_path / "checkpoints" / "step_000004.damaged-2").is_dir()


def test_two_ranks_train_from_the_command_line(moe_model: Path, demonstrations: Path, tmp_path: Path) -> None:
    recipe = sft_recipe(moe_model, demonstrations, max_steps=2, monitor={"tensorboard": True})
    path = tmp_path / "recipe.json"
    path.write_text(recipe.model_dump_json(by_alias=True))
    finish(start_ranks(2, *trainer_command(path, tmp_path / "run", 1)))
    assert filesystem.damage(filesystem.version_dir(tmp_path / "run", 2)) == []
    assert checkpoints.committed(tmp_path / "run") == [2]
    assert list((tmp_path / "run" / "tensorboard").iterdir())
