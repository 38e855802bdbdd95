"""GRPO-clip, GSPO and CISPO against the formulas of their papers in float64: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from primeslurm.orchestrator.algorithms import Grpo
from primeslurm.orchestrator.batching.batches import documents, loss_tokens
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe.sections.losses import CispoLoss, GrpoClipLoss, GspoLoss
from primeslurm.trainer.components.loss import Documents, Targets, from_recipe
from primeslurm.wire.batches.batch import stack
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.batches import pack
from tests.trainer.conftest import finish, start_ranks

Config = GrpoClipLoss | GspoLoss | CispoLoss
Formula = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
DOCUMENTS, LENGTH = 60, 12


def sample(seed: int = 0) -> tuple[torch.Tensor, Targets]:
    """Return trained tokens of many documents, with ratios of 0.3 to 3."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, LENGTH, (DOCUMENTS,), generator=generator)
    index = torch.arange(DOCUMENTS).repeat_interleave(lengths)
    engine = -3 * torch.rand(len(index), generator=generator).double()
    of_document = torch.randn(DOCUMENTS, generator=generator).double() / 4
    apart = of_document[index] + torch.randn(len(index), generator=generator).double() / 2
    targets = Targets(
        labels=torch.zeros(len(index), dtype=torch.long),
        logprobs=engine,
        advantages=torch.randn(DOCUMENTS, generator=generator).double()[index],
        temperatures=torch.ones(len(index)),
        on_policy=torch.zeros(len(index), dtype=torch.bool),
        ref_logprobs=-3 * torch.rand(len(index), generator=generator).double(),
        documents=Documents(index, DOCUMENTS),
    )
    return (engine + apart).requires_grad_(), targets


def grpo_clip(config: GrpoClipLoss, logp: torch.Tensor, engine: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """One sequence: sum of eq. 8 of DAPO (arXiv 2503.14476), or with dual_clip eq. 5 of arXiv 1912.09729."""
    ratio = torch.exp(logp - engine)
    clipped = torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    if config.dual_clip is not None and advantage < 0:
        objective = torch.maximum(objective, config.dual_clip * advantage)
    return -objective.sum()


def gspo(config: GspoLoss, logp: torch.Tensor, engine: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """One sequence: eq. 5 and 7 of arXiv 2507.18071, times its number of tokens."""
    ratio = torch.exp((logp - engine).mean())
    clipped = torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    return -len(logp) * torch.minimum(ratio * advantage, clipped * advantage)


def cispo(config: CispoLoss, logp: torch.Tensor, engine: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """One sequence: sum of eq. 4 and 5 of arXiv 2506.13585."""
    weight = torch.clip(torch.exp(logp - engine), config.min_ratio, config.max_ratio).detach()
    return -(weight * advantage * logp).sum()


CASES = [
    pytest.param(GrpoClipLoss(), grpo_clip, id="grpo_clip"),
    pytest.param(GrpoClipLoss(clip_low=0.1, clip_high=0.1, dual_clip=1.5, advantage_coef=2.0), grpo_clip, id="dual"),
    pytest.param(GspoLoss(), gspo, id="gspo"),
    pytest.param(GspoLoss(clip_low=0.1, clip_high=0.3, advantage_coef=0.5, kl_tau=0.1), gspo, id="gspo-wide"),
    pytest.param(CispoLoss(max_ratio=1.5), cispo, id="cispo"),
    pytest.param(CispoLoss(min_ratio=0.7, max_ratio=1.3, kl_tau=0.01), cispo, id="cispo-both"),
]


def of_document(targets: Targets, number: int) -> torch.Tensor:
    return targets.documents.index == number


@pytest.mark.parametrize(("config", "formula"), CASES)
def test_losses_match_the_formulas_of_their_papers(config: Config, formula: Formula) -> None:
    logp, targets = sample()
    exact = torch.zeros((), dtype=torch.float64)
    for number in range(DOCUMENTS):
        here = of_document(targets, number)
        if here.any():
            advantage = targets.advantages[here][0]
            exact = exact + config.advantage_coef * formula(config, logp[here], targets.logprobs[here], advantage)
            exact = exact + config.kl_tau * ((logp - targets.logprobs)[here] ** 2).sum()
    (gradient,) = torch.autograd.grad(exact, logp)
    sums = from_recipe(config)(logp, torch.zeros_like(logp), targets)
    (actual,) = torch.autograd.grad(sums.loss, logp)
    torch.testing.assert_close(sums.loss, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual, gradient, rtol=1e-10, atol=1e-12)
    without = (actual == 0).sum().item()
    high, low = (sums.metrics[f"masked_{side}_fraction"].item() for side in ("high", "low"))
    assert high > 0 and (low > 0 or getattr(config, "min_ratio", 1) == 0), "the data must be on both sides"
    assert sums.metrics["masked_fraction"].item() == high + low
    if config.type == "cispo":
        assert without == 0, "no token loses its gradient"
    elif config.kl_tau == 0:
        assert without == high + low, "exactly the tokens that are said to be masked have none"


@pytest.mark.parametrize("config", [GrpoClipLoss(ref_kl=0.3), GspoLoss(ref_kl=0.3), CispoLoss(ref_kl=0.3)])
def test_gradient_of_teacher_kl_equals_that_of_an_advantage(config: Config) -> None:
    """The gradient is that of the loss with teacher minus trainer log-probabilities as advantages."""
    logp, targets = sample()
    alone = from_recipe(config.model_copy(update={"ref_kl": None}))
    towards = (targets.ref_logprobs - logp).detach()
    kl = from_recipe(config)(logp, torch.zeros_like(logp), targets).loss - alone(logp, logp, targets).loss
    (actual,) = torch.autograd.grad(kl, logp)
    pulled = alone(logp, logp, Targets(**{**vars(targets), "advantages": towards}))
    (gradient,) = torch.autograd.grad(pulled.loss, logp)
    torch.testing.assert_close(actual, 0.3 * gradient, rtol=1e-10, atol=1e-12)


def test_gspo_of_packed_rows_matches_the_paper() -> None:
    """From groups to the loss: the mean over sequences, for any lengths and packing."""
    rng = np.random.default_rng(0)
    rewards = [[1.0, 0.0, 0.25], [0.5, 0.0, 0.0]]
    groups = [
        RolloutGroup(f"g{g}", "e", g, 0, tuple((sequence(rng, reward),) for reward in mine))
        for g, mine in enumerate(rewards)
    ]
    config = GspoLoss(clip_low=0.05, clip_high=0.1)
    docs = documents(groups, 64, 0, Grpo(), average=config.average)
    total = torch.zeros((), dtype=torch.float64)
    current: dict[bytes, torch.Tensor] = {}
    for group in groups:
        for one in group.sequences:
            engine = torch.from_numpy(one.logprobs.astype(np.float64))
            now = (engine + torch.from_numpy(rng.normal(0, 0.3, len(engine)))).requires_grad_()
            current[one.token_ids.tobytes()] = now
            ratio = (now - engine)[torch.from_numpy(one.mask)].mean().exp()
            advantage = one.info.reward - np.mean(group.rewards)
            total = total - torch.minimum(ratio * advantage, ratio.clip(0.95, 1.1) * advantage)
    exact = total / 6
    (rows,) = pack(docs, 64, 1, 1.0)
    arrays = {name: torch.from_numpy(array) for name, array in stack(rows).items()}
    actual = packed_loss(config, arrays, docs, current) / loss_tokens(docs)
    torch.testing.assert_close(actual, exact, rtol=1e-6, atol=1e-8)  # advantages of rows are float32
    leaves = list(current.values())
    for mine, theirs in zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(exact, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def sequence(rng: np.random.Generator, reward: float) -> Rollout:
    length = int(rng.integers(8, 30))
    mask = np.arange(length) > 4
    logprobs = np.where(mask, -3 * rng.random(length), 0).astype(np.float32)
    ids = rng.integers(0, 1000, length).astype(np.int32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Rollout(RolloutInfo("r", "g", "e", 0, reward), ids, mask, logprobs, versions)


def packed_loss(
    config: Config, arrays: dict[str, torch.Tensor], docs: list[Any], current: dict[bytes, torch.Tensor]
) -> torch.Tensor:
    """Return the loss of packed rows with `current` log-probabilities."""
    mask = arrays["mask"]
    by_tokens = {doc.token_ids.tobytes(): doc for doc in docs}
    rows = []
    for ids, positions in zip(arrays["token_ids"], arrays["positions"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        pieces = [ids[a:b] for a, b in pairwise(starts)]
        rows.append(
            torch.cat(
                [
                    current[piece.numpy().tobytes()]
                    if piece.numpy().tobytes() in by_tokens
                    else torch.zeros(len(piece), dtype=torch.float64)
                    for piece in pieces
                ]
            )
        )
    whole = Targets(
        labels=arrays["token_ids"].long(),
        ref_logprobs=torch.zeros_like(arrays["logprobs"]),
        documents=Documents.of(arrays["positions"]),
        **{name: arrays[name] for name in ("logprobs", "advantages", "temperatures", "on_policy")},
    )
    trained = whole.apply(lambda tensor: tensor[mask])
    logp = torch.stack(rows)[mask]
    return from_recipe(config)(logp, torch.zeros_like(logp), trained).loss


def test_gspo_sees_whole_sequences_across_context_parallel_ranks() -> None:
    outputs = finish(start_ranks(4, "tests.trainer.loss_ranks"))
    assert all("EQUAL 2 4" in output for output in outputs), outputs
