"""Several trained agents: advantages by agent in float64, baselines across restarts, and rollouts of a real worker."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.orchestrator.algorithms import Echo, Grpo, HierarchicalGrpo, MaxRl, Opd, Rae, from_recipe
from primeslurm.orchestrator.batching.batches import Batches, scale_to_average
from primeslurm.orchestrator.pipeline.progress import CHECKPOINT_PART, RunProgress, restore
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.telemetry.batch_metrics import batch_metrics
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from primeslurm.wire.stored import checkpoints
from tests.support.batches import batch_of
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.recipes import recipe_data
from tests.support.rollouts import rollouts, small_recipe, with_words

AGENTS = ("proposer", "solver")


@st.composite
def groups(draw: st.DrawFn) -> list[RolloutGroup]:
    """A batch with groups of two environments. Each rollout has a proposer and up to three solvers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return [
        make_group(rng, f"g{number}", draw(st.sampled_from(["duel", "quiz"])), int(rng.integers(1, 5)))
        for number in range(draw(st.integers(1, 4)))
    ]


def make_group(rng: np.random.Generator, name: str, environment: str, size: int) -> RolloutGroup:
    rollouts = []
    for _ in range(size):
        agents_of_rollout = [AGENTS[0], *[AGENTS[1]] * int(rng.integers(1, 4))]
        rollouts.append(
            tuple(
                sequence
                for trace, agent in enumerate(agents_of_rollout)
                for sequence in make_trace(rng, environment, agent, trace, float(np.float32(rng.normal())))
            )
        )
    return RolloutGroup(name, environment, 0, 0, tuple(rollouts))


def make_trace(
    rng: np.random.Generator, environment: str, agent: str, trace: int, reward: float
) -> tuple[Rollout, ...]:
    info = RolloutInfo("r", "g", environment, 0, reward, agent=agent, trace=trace)
    sequences = []
    for _ in range(int(rng.integers(1, 3))):
        length = int(rng.integers(2, 12))
        mask = np.arange(length) > rng.integers(0, length)
        logprobs = np.where(mask, -rng.random(length), 0).astype(np.float32)
        ids, versions = rng.integers(0, 9, length).astype(np.int32), np.where(mask, 0, -1).astype(np.int32)
        sequences.append(Rollout(info, ids, mask, logprobs, versions, ref_logprobs=np.zeros(length, np.float32)))
    return tuple(sequences)


def rewards(group: RolloutGroup, agent: str, rollout: int | None = None) -> np.ndarray:
    """Return the rewards of an agent's traces, in float64."""
    chosen = group.rollouts if rollout is None else [group.rollouts[rollout]]
    by_rollout = [{one.info.trace: one.info.reward for one in r if one.info.agent == agent} for r in chosen]
    return np.array([reward for mine in by_rollout for reward in mine.values()], np.float64)


def check(group: RolloutGroup, credits: Any, exact: Any) -> None:
    """Compare a group's credits with `exact(sequence, number of its rollout)`."""
    numbered = [(number, one) for number, rollout in enumerate(group.rollouts) for one in rollout]
    for (number, one), credit in zip(numbered, credits, strict=True):
        assert np.allclose(credit.advantages.astype(np.float64), exact(one, number), rtol=1e-5, atol=1e-5)
        assert (credit.mask == one.mask).all()


@given(batch=groups())
def test_grpo_compares_traces_of_the_same_agent(batch: list[RolloutGroup]) -> None:
    for group, credits in zip(batch, Grpo().assign(batch), strict=True):
        check(group, credits, lambda one, _, g=group: one.info.reward - rewards(g, one.info.agent).mean())
    for group, credits in zip(batch, Opd(0.5).assign(batch), strict=True):
        gap = {id(one): np.where(one.mask, -one.logprobs.astype(np.float64), 0) for one in group.sequences}
        check(
            group,
            credits,
            lambda one, _, g=group, gap=gap: gap[id(one)] + 0.5 * (one.info.reward - rewards(g, one.info.agent).mean()),
        )


@given(batch=groups())
def test_max_rl_divides_by_the_mean_of_the_agent(batch: list[RolloutGroup]) -> None:
    def exact(group: RolloutGroup, one: Rollout) -> float:
        mean = rewards(group, one.info.agent).mean()
        return float((one.info.reward - mean) / mean) if mean > 1e-3 else 0.0

    for group, credits in zip(batch, MaxRl().assign(batch), strict=True):
        if all(abs(rewards(group, agent).mean()) > 1e-3 for agent in AGENTS):
            check(group, credits, lambda one, _, g=group: exact(g, one))


@given(batch=groups())
def test_hierarchical_grpo_compares_solvers_within_their_rollout(
    batch: list[RolloutGroup],
) -> None:
    for group, credits in zip(batch, HierarchicalGrpo(("solver",)).assign(batch), strict=True):
        check(
            group,
            credits,
            lambda one, number, g=group: (
                one.info.reward - rewards(g, one.info.agent, number if one.info.agent == "solver" else None).mean()
            ),
        )


@given(batch=groups(), decay=st.sampled_from([0.0, 0.5, 0.95]), split=st.integers(0, 4))
def test_rae_carries_a_baseline_per_environment_and_agent(batch: list[RolloutGroup], decay: float, split: int) -> None:
    # Batches and restarts must not change the recursion of SPIRAL over all traces.
    baseline: dict[tuple[str, str], float] = {}
    expected = []
    for group in batch:
        for trace in group.traces:
            key, reward = (group.environment, trace[0].info.agent), np.float64(trace[0].info.reward)
            baseline[key] = decay * baseline.get(key, 0.0) + (1 - decay) * reward
            expected += [reward - baseline[key]] * len(trace)
    advantages, memory = [], {}
    for part in (batch[:split], batch[split:]):
        algorithm = Rae(decay).recalling(memory)
        again = Rae(decay).recalling(msgspec.msgpack.decode(msgspec.msgpack.encode(dict(memory))))
        credits = algorithm.assign(part)
        repeated = again.assign([RolloutGroup.from_bytes(group.to_bytes()) for group in part])
        for one, other in zip(chain.from_iterable(credits), chain.from_iterable(repeated), strict=True):
            assert (one.advantages == other.advantages).all(), "assign must be pure"
        advantages += [credit.advantages[0] for mine in credits for credit in mine]
        memory = Echo(Rae(decay), 0.1).remember(memory, part)
    assert np.allclose(np.array(advantages, np.float64), expected, rtol=1e-5, atol=1e-5)
    assert memory == pytest.approx({"/".join(key): value for key, value in baseline.items()})


def test_baselines_are_restored_with_the_checkpoint(tmp_path: Path) -> None:
    # The batches of steps 3 and 4 are formed before the checkpoint of step 2 is written.
    memory = {step: {"duel/solver": step / 10} for step in (2, 3, 4, 5)}
    directory = checkpoints.step_dir(tmp_path, 2)
    RunProgress(1, next_step=5, memory=memory).save(directory / CHECKPOINT_PART)
    checkpoints.commit(directory, 2, 1)
    assert restore(tmp_path, 2).memory[3] == {"duel/solver": 0.3}
    assert max(restore(tmp_path, 2).memory) == 3 == restore(tmp_path, 2).next_step
    made = Recipe.model_validate(recipe_data(orchestrator={"batch_size": 8, "advantages": "rae"}))
    batches = Batches(made, from_recipe(made))
    group = make_group(np.random.default_rng(0), "g", "duel", 1)
    batches.add(3, [group], memory[3])
    (row, *_) = batch_of(batches, 3).rows  # type: ignore[union-attr]
    algorithm = Rae().recalling(memory[3])
    wanted = {float(credit.advantages[0]) for credit in algorithm.assign([group])[0] if credit.mask[1:].any()}
    assert {float(value) for value in row.advantages[row.mask]} == wanted


def test_rollout_info_without_agent_and_penalty_is_read() -> None:
    old = {"id": "r", "group": "g", "environment": "e", "opened_version": 3, "reward": 0.5, "metrics": {"exact": 1.0}}
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=RolloutInfo)
    assert (info.agent, info.trace, info.length_penalty, info.net_reward) == ("", 0, 0.0, 0.5)


@given(batch=groups(), average=st.sampled_from(["rollouts", "seq_len"]))
def test_average_over_rollouts_or_seq_len(batch: list[RolloutGroup], average: Any) -> None:
    # The trainer sums over the batch, and divides by its number of trained tokens.
    credits = Grpo().assign(batch)
    scaled = scale_to_average(batch, credits, average, 16)
    total = sum(int(credit.mask.sum()) for mine in credits for credit in mine)
    total_advantage, exact, rollouts = 0.0, 0.0, 0
    for group, mine, theirs in zip(batch, scaled, credits, strict=True):
        left, right = iter(mine), iter(theirs)
        for trace in group.traces:
            ours, plain = [next(left) for _ in trace], [next(right) for _ in trace]
            tokens = sum(int(credit.mask.sum()) for credit in ours)
            rollouts += tokens > 0
            total_advantage += sum(credit.advantages[credit.mask].astype(np.float64).sum() for credit in ours)
            advantages = np.concatenate([credit.advantages[credit.mask].astype(np.float64) for credit in plain])
            exact += advantages.mean() if average == "rollouts" and tokens else advantages.sum() / 16
    if total:
        assert total_advantage / total == pytest.approx(exact / rollouts, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("orchestrator", "environment", "field"),
    [
        ({"advantages": "hierarchical_grpo"}, {}, "orchestrator.within_rollout"),
        ({}, {"advantages": "hierarchical_grpo"}, "orchestrator.within_rollout"),
        ({"within_rollout": ["solver"]}, {}, "orchestrator.within_rollout"),
        ({"rae_decay": 0.9}, {}, "orchestrator.rae_decay"),
        ({"rae_decay": 0.9, "advantages": "rae"}, {"advantages": "grpo"}, "orchestrator.rae_decay"),
        ({"advantages": "rae", "filters": [{"type": "zero_advantage"}]}, {}, "orchestrator.filters"),
        ({"advantages": "rae"}, {"filters": [{"type": "zero_advantage"}]}, "environments.0.filters"),
    ],
)
def test_options_without_their_rule_are_refused(
    orchestrator: dict[str, Any], environment: dict[str, Any], field: str
) -> None:
    sizes = {"batch_size": 8, "group_size": 4}
    data = recipe_data(orchestrator=sizes | orchestrator, environments=[{"id": "reverse-text"} | environment])
    assert [violation.field for violation in violations(Recipe.model_validate(data))] == [field]


class DuelConfig(vf.EnvConfig):  # type: ignore[misc]
    proposer: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    solver: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    judge: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    solvers: int = 2


class DuelEnv(vf.Env[DuelConfig]):  # type: ignore[misc]
    """A proposer reverses a word, and solvers reverse its reply. It wins if they fail. The judge is not trained."""

    async def setup(self, agents: vf.Agents) -> None:
        agents.judge.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        proposed = await agents.proposer.run(task)
        word = (proposed.last_reply or "").strip()
        data = task.data.model_copy(update={"prompt": f"Reverse: {word}", "answer": word[::-1]})
        proposed_task = type(task)(data, task.config)
        await asyncio.gather(*(agents.solver.run(proposed_task) for _ in range(self.config.solvers)))
        await agents.judge.run(task)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        missed = [1 - trace.reward for trace in episode.traces if trace.agent.name == "solver"]
        for trace in episode.traces:
            if trace.agent.name == "proposer":
                trace.rewards.clear()
                trace.record_reward("missed", float(np.mean(missed)))


async def test_worker_returns_the_traces_of_all_trained_agents(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    made = small_recipe(tokenizer, environments=[{"id": "reverse-text", "name": "duel"}])
    with FakeEngine(tokenizer, mistakes=2) as engine:
        engine.version = 3
        found = [await rollouts(engine, made, with_words(DuelEnv, DuelConfig)) for _ in range(4)]
    group = RolloutGroup("g", "duel", 0, 3, tuple(found))
    agents_of_rollout = [trace[0].info.agent for trace in group.traces]
    assert agents_of_rollout == ["proposer", "solver", "solver"] * 4, "the judge is not trained"
    assert len(engine.requests) == 16
    for number, trace in enumerate(group.traces):
        assert [one.info.trace for one in trace] == [number % 3] * len(trace)
        assert sum(int(one.mask.sum()) for one in trace) > 0
    for index in range(4):
        mine = group.traces[3 * index : 3 * index + 3]
        solved = [trace[0].info.reward for trace in mine[1:]]
        assert mine[0][0].info.reward == pytest.approx(1 - np.mean(solved)), "each trace has its own reward"
    metrics = batch_metrics([group], 4, 64)
    assert metrics["duel/solver/reward"] == pytest.approx(rewards(group, "solver").mean())
    assert metrics["reward/mean"] == pytest.approx(np.mean(group.rewards))
    (credits,) = Grpo().assign([group])
    by_role = dict.fromkeys(AGENTS, 0.0)
    for one, credit in zip(group.sequences, credits, strict=True):
        by_role[one.info.agent] += float(credit.advantages[0])
    assert by_role == pytest.approx(dict.fromkeys(AGENTS, 0.0), abs=1e-6), "each role's advantages sum to zero"
