"""Extreme log-probabilities: impossible tokens are not trained, and gradients of single tokens are bounded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from primeslurm.orchestrator.algorithms.opd import Opd
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe.sections.losses import CispoLoss, CustomLoss, DppoLoss, GrpoClipLoss, GspoLoss, IpoLoss, Loss
from primeslurm.trainer.components.loss import Documents, Sums, Targets, from_recipe
from primeslurm.wire.batches.rollout import MIN_LOGPROB, Rollout, RolloutInfo

TOKENS, ODD = 12, 5
"""Number of tokens (two sequences of six), and the index of the extreme one."""


def ratio_of_ones_own(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
    """A custom loss that overflows: an unbounded ratio, and where()."""
    ratio = (logprobs - targets.logprobs).exp()
    return Sums(-torch.where(ratio < 2, ratio * targets.advantages, 2 * targets.advantages).sum(), {})


LOSSES: list[Loss] = [
    DppoLoss(),
    DppoLoss(ref_kl=0.1),
    DppoLoss(ratio_cap=None, ref_kl=0.1),
    IpoLoss(ref_kl=0.1),
    GrpoClipLoss(ref_kl=0.1),
    GrpoClipLoss(dual_clip=3.0, kl_tau=0.1, ratio_cap=None),
    GspoLoss(ref_kl=0.1),
    GspoLoss(ratio_cap=None),
    CispoLoss(ref_kl=0.1, kl_tau=0.1),
    CustomLoss(function=f"{__name__}:ratio_of_ones_own"),
]


def sample(sign: float) -> tuple[torch.Tensor, Targets]:
    generator = torch.Generator().manual_seed(0)
    engine = -0.1 - 3 * torch.rand(TOKENS, generator=generator)
    targets = Targets(
        labels=torch.zeros(TOKENS, dtype=torch.long),
        logprobs=engine,
        advantages=sign * (0.5 + torch.rand(TOKENS, generator=generator)),
        temperatures=torch.ones(TOKENS),
        on_policy=torch.ones(TOKENS, dtype=torch.bool),
        ref_logprobs=-3 * torch.rand(TOKENS, generator=generator),
        documents=Documents(torch.arange(TOKENS) // 6, 2),
    )
    return engine + 0.05 * torch.randn(TOKENS, generator=generator), targets


def changed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    copy = tensor.clone()
    copy[ODD] = value
    return copy


def gradient(config: Loss, logprobs: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, dict[str, float]]:
    own = logprobs.clone().requires_grad_()
    sums = from_recipe(config)(own, torch.ones(TOKENS), targets)
    (actual,) = torch.autograd.grad(sums.loss, own)
    return actual, {name: value.item() for name, value in sums.metrics.items()}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("value", [-60.0, -89.0, -104.0, -9999.0, -1e30, -math.inf, math.nan, 5.0, 1e30, math.inf])
@pytest.mark.parametrize("config", LOSSES, ids=lambda config: config.type)
def test_token_with_impossible_logprob_is_not_trained(config: Loss, value: float, sign: float) -> None:
    logprobs, targets = sample(sign)
    actual, metrics = gradient(config, logprobs, replace(targets, logprobs=changed(targets.logprobs, value)))
    assert actual[ODD] == 0
    assert metrics["impossible_fraction"] == 1, "metrics are sums until they are divided by the tokens"
    assert all(map(math.isfinite, metrics.values()))
    others = torch.arange(TOKENS) != ODD
    if isinstance(config, GspoLoss):  # in its own sequence, the token counts as one that did not move
        others = torch.arange(TOKENS) // 6 != ODD // 6
        assert actual.isfinite().all()
    expected, plain = gradient(config, logprobs, targets)
    assert torch.equal(actual[others], expected[others]), "bit for bit"
    assert plain["impossible_fraction"] == 0 and plain.get("capped_fraction", 0) == 0


@pytest.mark.parametrize("value", [-12.0, -20.0, -39.9])
@pytest.mark.parametrize("config", [DppoLoss(), IpoLoss(), GrpoClipLoss(), CispoLoss()], ids=lambda config: config.type)
def test_ratio_cap_limits_the_gradient_of_a_token(config: Any, value: float) -> None:
    logprobs, targets = sample(-1.0)
    # The trainer finds it unlikely as well: no trust region of probabilities drops it.
    logprobs = changed(logprobs, -5.0)
    actual, metrics = gradient(config, logprobs, replace(targets, logprobs=changed(targets.logprobs, value)))
    cap = config.max_ratio if isinstance(config, CispoLoss) else config.ratio_cap
    exact = -targets.advantages[ODD].item() * cap + config.kl_tau * 2 * (-5.0 - value)
    assert actual[ODD].item() == pytest.approx(exact, rel=1e-5)
    if not isinstance(config, CispoLoss):
        assert metrics["capped_fraction"] == 1
    expected, _ = gradient(config, logprobs, replace(targets, logprobs=changed(targets.logprobs, -5.0)))
    others = torch.arange(TOKENS) != ODD
    assert torch.equal(actual[others], expected[others])


def test_ratio_cap_limits_the_gradient_of_a_sequence() -> None:
    logprobs, targets = sample(-1.0)
    first = torch.arange(TOKENS) < 6
    actual, metrics = gradient(
        GspoLoss(), logprobs, replace(targets, logprobs=torch.where(first, logprobs - 20, logprobs))
    )
    torch.testing.assert_close(actual, torch.where(first, -10 * targets.advantages, -targets.advantages))
    assert metrics["capped_fraction"] == 6


@pytest.mark.parametrize("teacher", [0.0, -30.0, -9999.0])
@pytest.mark.parametrize("trainer", [-1.0, -30.0, -200.0, -9999.0])
@pytest.mark.parametrize("engine", [-1.0, -30.0])
def test_gradient_of_teacher_kl_is_bounded(teacher: float, trainer: float, engine: float) -> None:
    """The gradient is -r * u, with r and u bounded."""
    logprobs, targets = sample(0.0)
    targets = replace(
        targets,
        logprobs=changed(targets.logprobs, engine),
        ref_logprobs=changed(targets.ref_logprobs, teacher),
        advantages=torch.zeros(TOKENS),
    )
    config = DppoLoss(kl_tau=0.0, ref_kl=1.0, mask_low=9.0, mask_high=9.0)
    actual, metrics = gradient(config, changed(logprobs, trainer), targets)
    ratio = min(math.exp(trainer - engine), 10.0)
    assert actual[ODD].item() == pytest.approx(-ratio * min(max(teacher - trainer, -15), 15), rel=1e-2, abs=1e-6)
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize(
    ("teacher", "engine", "gap"), [(-9999.0, -1.0, -39.0), (-2.0, -9999.0, 38.0), (-3.0, -1.0, -2.0)]
)
def test_distillation_bounds_teacher_logprobs(teacher: float, engine: float, gap: float) -> None:
    info = RolloutInfo(
        id="r", group="g", environment="e", opened_version=0, reward=0.0, metrics={}, turns=1, finish_reason="stop",
        seconds=1.0,
    )  # fmt: skip
    rollout = Rollout(
        info,
        np.array([5, 6], np.int32),
        np.array([False, True]),
        np.array([0, engine], np.float32),
        np.array([-1, 0], np.int32),
        ref_logprobs=np.array([0, teacher], np.float32),
    )
    ((credit,),) = Opd().assign([RolloutGroup("g", "e", 0, 0, ((rollout,),))])
    assert MIN_LOGPROB == -40
    assert credit.advantages.tolist() == [0, gap]
