"""Policy gradient losses learn: the reward of a small policy rises within a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from scripts.models import tiny_model
from tests.support.batches import batch_of
from tests.trainer.conftest import make_recipe, make_timer

STEPS, GROUPS, MEMBERS, PROMPT, SAMPLED = 7, 8, 16, 2, 6


@pytest.mark.parametrize(
    "loss",
    [
        {"type": "grpo_clip", "average": "rollouts", "dual_clip": 3.0},
        pytest.param({"type": "gspo", "clip_low": 0.03, "clip_high": 0.04}, marks=pytest.mark.campaign),
        pytest.param({"type": "cispo", "average": "seq_len"}, marks=pytest.mark.campaign),
    ],
    ids=lambda loss: "-".join(str(value) for value in loss.values()),
)
def test_the_reward_rises(loss: dict[str, Any], dense_model: Path, world: World, tmp_path: Path) -> None:
    """The reward is the fraction of even tokens. Every other batch is one step old, so that ratios differ from 1."""
    recipe = make_recipe(
        dense_model,
        max_steps=STEPS,
        trainer={"loss": loss, "optimizer": {"lr": 3e-2}, "memory": {"lm_head_chunk": 32}},
        orchestrator={"batch_size": GROUPS * MEMBERS, "group_size": MEMBERS},
    )
    torch.set_num_threads(1)  # the model is far too small for more
    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    batches, timer = Batches(recipe, algorithms.from_recipe(recipe)), make_timer(tmp_path)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    rewards, metrics, older = [], [], None
    for step in range(1, STEPS + 1):
        fresh = sample(policy, rng)
        rewards.append(float(np.mean([group.rewards for group in fresh])))
        batches.add(step, older if step % 2 == 0 and older else fresh)
        older = fresh
        batch = batch_of(batches, step)
        assert batch is not None
        metrics.append(train_step.train(batch, timer))
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1, rewards
    assert metrics[0]["importance_ratio"] == pytest.approx(1, abs=1e-3), "what it sampled itself"
    assert abs(metrics[1]["importance_ratio"] - 1) > 1e-3 or metrics[1]["off_policy_kl"] > 1e-5, "what is a step old"


def sample(policy: PolicyModel, rng: np.random.Generator) -> list[RolloutGroup]:
    """Sample groups of answers to random prompts."""
    prompts = np.repeat(rng.integers(3, tiny_model.VOCABULARY, (GROUPS, PROMPT)), MEMBERS, axis=0)
    tokens, logprobs = torch.from_numpy(prompts), []
    with torch.no_grad():
        for _ in range(SAMPLED):
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
            (logits,) = policy.logits(tokens, positions)
            scores = logits[:, -1].float().log_softmax(-1)
            chosen = torch.multinomial(scores.exp(), 1)
            logprobs.append(scores.gather(-1, chosen))
            tokens = torch.cat([tokens, chosen], dim=1)
    ids, scores = tokens.numpy().astype(np.int32), torch.cat(logprobs, dim=1).numpy()
    return [
        RolloutGroup(
            f"g{g}", "e", g, 0, tuple((rollout(ids[i], scores[i]),) for i in range(g * MEMBERS, (g + 1) * MEMBERS))
        )
        for g in range(GROUPS)
    ]


def rollout(ids: np.ndarray, scores: np.ndarray) -> Rollout:
    reward = float((ids[PROMPT:] % 2 == 0).mean())
    mask = np.arange(len(ids)) >= PROMPT
    logprobs = np.concatenate([np.zeros(PROMPT), scores]).astype(np.float32)
    return Rollout(RolloutInfo("r", "g", "e", 0, reward), ids, mask, logprobs, np.where(mask, 0, -1).astype(np.int32))
