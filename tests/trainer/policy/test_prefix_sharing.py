"""Prompts that are computed once give the loss, log-probabilities and gradients of prompts in every rollout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeslurm.models.registry import bundled, model_types
from primeslurm.orchestrator.batching.batches import _kept_documents
from primeslurm.orchestrator.batching.packing import Common, Document, PackedRow, PrefixTree, RowLengths, encode, pack
from primeslurm.orchestrator.batching.prefix_trees import pack_trees
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.flops_meter import FlopsMeter
from primeslurm.trainer.policy.kept_logprobs import KeptLogprobs
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.batch import Batch, BatchInfo
from scripts.models import tiny_model
from tests.support.batches import received
from tests.trainer.conftest import SEQ_LEN, make_recipe
from tests.trainer.families import BY_NAME, write

pytestmark = pytest.mark.usefixtures("unmeasured")

LORA = {"rank": 8}
SHARING = sorted(name for name, can in model_types(bundled()).items() if can.prefix_sharing)


@dataclass
class Trained:
    """Everything that must not depend on how documents are packed."""

    forwarded: float
    logprobs: dict[int, dict[int, float]]  # by document and token
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("case", "attention"),
    [
        *((case, "varlen") for case in SHARING),
        ("qwen3_moe", "flex"),
        *(pytest.param(case, "flex", marks=pytest.mark.campaign) for case in SHARING if case != "qwen3_moe"),
    ],
)
def test_shared_prompts_change_no_value(case: str, attention: Any, tmp_path: Path, world: World) -> None:
    write(BY_NAME[case], tmp_path / case)
    check(tmp_path / case, attention, {}, world, tmp_path)


@pytest.mark.parametrize("case", ["llama", "qwen3_moe"])
def test_shared_prompts_change_no_value_with_adapters(case: str, tmp_path: Path, world: World) -> None:
    write(BY_NAME[case], tmp_path / case)
    check(
        tmp_path / case, "varlen", {"lora": LORA, "parallelism": {"activation_checkpointing": "full"}}, world, tmp_path
    )


def check(model: Path, attention: Any, trainer: dict[str, Any], world: World, directory: Path) -> None:
    # The ratio of `gspo` is that of the whole rollout, so it depends on where rollouts begin and end.
    recipe = make_recipe(
        model, trainer=trainer | {"loss": {"type": "gspo"}, "optimizer": {"lr": 1e-3, "max_norm": None}}
    )
    policy, docs = build(recipe, world, attention), documents()
    lengths = RowLengths(2 * SEQ_LEN, None)
    plain, trees = pack(docs, lengths, 1)[0], pack_trees(docs, lengths, 1)[0]
    assert len(trees) < len(plain)
    assert any(sum(isinstance(each, PrefixTree) for each in row.documents) > 1 for row in trees)
    step = TrainStep(policy, recipe, world, meter=FlopsMeter(None, world), kept=KeptLogprobs(directory, 1, 0))
    expected, actual = (trained(step, batch(docs, rows)) for rows in (plain, trees))
    assert expected.forwarded == sum(map(len, docs)) and actual.forwarded < 0.6 * expected.forwarded
    assert expected.logprobs.keys() == actual.logprobs.keys() == set(range(len(docs)))
    for number, doc in enumerate(docs):
        assert list(actual.logprobs[number]) == np.flatnonzero(doc.mask).tolist()
        assert actual.logprobs[number] == pytest.approx(expected.logprobs[number], abs=2e-5)
    assert actual.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    for name, gradient in expected.gradients.items():
        assert (actual.gradients[name] - gradient).abs().max() <= 1e-5 + 1e-4 * gradient.abs().max(), name


def documents() -> list[Document]:
    """Return rollouts in groups of 9, 4, 4, 1 and 1, in mixed order. Each has two turns."""
    rng = np.random.default_rng(0)
    docs = []
    for prompt_length, members in ((21, 9), (6, 4), (7, 4), (9, 1), (1, 1)):
        prompt = rng.integers(3, tiny_model.VOCABULARY, prompt_length)
        for _ in range(members):
            turns = [int(rng.integers(1, 5)) for _ in range(3)]
            tokens = np.concatenate([prompt, rng.integers(3, tiny_model.VOCABULARY, sum(turns))]).astype(np.int32)
            mask = np.repeat([False, True, False, True], [prompt_length, *turns])
            logprobs = np.where(mask, -5 + rng.random(len(mask)), 0).astype(np.float32)
            advantages = np.where(mask, rng.normal(), 0).astype(np.float32)
            docs.append(Document(tokens, mask, logprobs, advantages, on_policy=bool(rng.random() < 0.5)))
    return [docs[index] for index in rng.permutation(len(docs))]


def batch(docs: list[Document], rows: list[PackedRow]) -> Batch:
    tokens = sum(int(doc.mask.sum()) for doc in docs)
    kept = _kept_documents([rows], {id(doc): number for number, doc in enumerate(docs)})[0]
    trees = any(isinstance(each, PrefixTree) for row in rows for each in row.documents)
    return received(encode(rows, BatchInfo(1, 0, 1, tokens, kept=kept), Common.of(docs, 0.7, has_branches=trees)))


def trained(step: TrainStep, batch: Batch) -> Trained:
    step.optimizer.zero_grad()
    metrics = step._accumulate(batch, batch.info.loss_tokens)
    collected = {
        number: dict(zip(tokens.tolist(), values.tolist(), strict=True))
        for number, tokens, values in step._kept._collected
    }
    step._kept._collected.clear()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in step.policy.model.named_parameters()
        if parameter.grad is not None
    }
    return Trained(step._meter.take(1.0)["forwarded_tokens"], collected, metrics, gradients)
