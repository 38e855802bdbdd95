"""A rollout that fills the context window is truncated, scored and trained; a task whose prompt never fits is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import verifiers.v1 as vf
from openai import APIStatusError
from verifiers.v1.harnesses.utils.compaction import is_context_overflow

from primeslurm.orchestrator.environments.chat import ChatHarness
from primeslurm.orchestrator.rollouts.job_protocol import PromptError
from primeslurm.wire.batches.rollout import Rollout
from tests.support import rollouts as support
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.rollouts import OneAgent, small_recipe, with_words

TURNS = 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Talk(vf.Env[OneAgent]):  # type: ignore[misc]
    """Asks again and again, as long as the exchange goes on."""

    question = "Reverse: again and again"

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(TURNS):
                if segment.terminated:
                    break
                segment = await interaction.turn(self.question)


class LongAnswer(Talk):
    """Answers the first reply with far more than fits: a tool's output, say."""

    question = "Reverse: " + "x" * 500


class OneTurn(Talk):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()


class TwoAgents(Talk):
    """A second trace whose first prompt does not fit: what is too long is what the first one said."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
        task.data = task.data.model_copy(update={"prompt": "Reverse: " + "x" * 500})
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()


async def rollouts(tokenizer: Path, env: type[Talk], seq_len: int) -> tuple[tuple[Rollout, ...], int]:
    """Run one job; returns its sequences, and how many tokens were sampled in all."""
    made = small_recipe(tokenizer, seq_len=seq_len)
    with FakeEngine(tokenizer) as engine:
        engine.version = 3
        found = await support.rollouts(engine, made, with_words(env))
        assert all(len(request["token_ids"]) < made.max_len for request in engine.requests)
        return found, sum(engine.sampled)


async def test_rollout_that_fills_the_window_is_truncated_and_all_it_sampled_is_trained(tokenizer: Path) -> None:
    found, sampled = await rollouts(tokenizer, Talk, 128)
    assert found[-1].info.finish_reason == "length"
    assert sum(int(rollout.mask.sum()) for rollout in found) == sampled > 0
    assert found[0].info.turns > 1 and 0 <= found[0].info.reward <= 1
    assert max(len(rollout.token_ids) for rollout in found) <= 128


async def test_whatever_room_the_last_prompt_leaves(tokenizer: Path) -> None:
    """None, because the prompt fills the window exactly; a single token; two."""
    long, _ = await rollouts(tokenizer, Talk, 400)
    third = np.flatnonzero(np.diff(long[0].mask.astype(int)) == 1)[2] + 1  # where the third answer begins
    for room in range(3):
        found, sampled = await rollouts(tokenizer, Talk, int(third) + room)
        assert found[-1].info.finish_reason == "length"
        assert sum(int(rollout.mask.sum()) for rollout in found) == sampled
        assert found[0].info.turns == 2 + (room > 0)
        assert int(found[0].mask[third:].sum()) == room


async def test_a_tool_result_that_overflows_truncates(tokenizer: Path) -> None:
    found, sampled = await rollouts(tokenizer, LongAnswer, 128)
    (rollout,) = found
    assert rollout.info.finish_reason == "length" and rollout.info.turns == 1
    assert int(rollout.mask.sum()) == sampled > 0


async def test_a_task_whose_own_prompt_is_too_long_is_told_apart(tokenizer: Path) -> None:
    with pytest.raises(PromptError, match="maximum context length") as raised:
        await rollouts(tokenizer, Talk, 10)
    assert raised.value.cause == "prompt"


async def test_a_later_agent_that_never_gets_a_word_in_costs_the_first_one_nothing(tokenizer: Path) -> None:
    found, sampled = await rollouts(tokenizer, TwoAgents, 128)
    assert sum(int(rollout.mask.sum()) for rollout in found) == sampled > 0
    assert {rollout.info.trace for rollout in found} == {0}


async def test_harnesses_can_ask_for_the_window_and_recognise_overflow(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harness compacts by the model card, and when it gets an error whose words it knows."""
    seen: list[httpx.Response] = []
    launch = ChatHarness.launch

    async def curious(
        self: ChatHarness, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *rest: Any
    ) -> Any:
        body = {"model": ctx.model, "messages": [{"role": "user", "content": "Reverse: " + "x" * 500}]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as client:
            seen.append(await client.get(f"{endpoint}/models"))
            seen.append(await client.post(f"{endpoint}/chat/completions", json=body))
        return await launch(self, ctx, trace, runtime, endpoint, secret, *rest)

    monkeypatch.setattr(ChatHarness, "launch", curious)
    (rollout,), _ = await rollouts(tokenizer, OneTurn, 128)
    models, refused = seen
    assert models.json()["data"] == [{"id": str(tokenizer), "object": "model", "max_model_len": 128}]
    assert is_context_overflow(APIStatusError(refused.text, response=refused, body=refused.json()))
    assert rollout.info.finish_reason == "stop", "the harness went on after the overflow: nothing was cut off"
