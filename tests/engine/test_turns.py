"""A conversation with a real engine: the trained tokens continue exactly the tokens that the engine reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primeslurm.orchestrator.rendering import renderer_selection
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import Completion, GenerateEndpoint
from primeslurm.orchestrator.worker.trace_sequences import sequences
from scripts.models import tiny_model
from tests.engine.conftest import STATUS_S, StartEngine
from tests.support.conversations import Message, RealEngine, converse

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
TURNS = 8


def replies(turn: int, message: Message) -> list[Message]:
    """Return tool results, whether or not there was a call, and questions, because a random model says anything."""
    if turn == TURNS - 1:
        return []
    if turn % 3 == 2:
        return [{"role": "user", "content": f"Question {turn}?"}]
    calls = message.get("tool_calls") or [{"id": f"call_{turn}"}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": f"found {turn}"} for call in calls]


async def test_trained_tokens_continue_the_engines_prompt(
    start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny_model.write_model(model, hidden=32)
    engine = start_engine(source=model)
    client = EngineClient(lambda: engine.url, str(model), status_timeout_s=STATUS_S)
    await client.apply(PolicyVersion(0, str(model)), timeout_s=600)
    seen: list[tuple[list[int], list[int]]] = []
    generate = GenerateEndpoint.generate

    async def watched(endpoint: GenerateEndpoint, body: dict[str, Any], *args: Any) -> Completion:
        completion = await generate(endpoint, {**body, "return_token_ids": True}, *args)
        assert completion.prompt_ids is not None, "the engine's own"
        seen.append((completion.prompt_ids, completion.token_ids))
        return replace(completion, prompt_ids=None)

    monkeypatch.setattr(GenerateEndpoint, "generate", watched)
    chosen = renderer_selection.select_renderer(str(model))
    assert not chosen.no_tools
    conversation = await converse(model, chosen, RealEngine(engine.url), replies, max_tokens=24, seed=1)
    rollouts = sequences(Job("j", "g", "e", 0, 0, "r", "s"), conversation.trace, conversation.completions, 1.0, False)
    assert len(seen) == TURNS
    trained = []
    for rollout in rollouts:
        tokens, mask = rollout.token_ids.tolist(), rollout.mask.tolist()
        for start in (i for i, is_sampled in enumerate(mask) if is_sampled and not mask[i - 1]):
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            trained.append((tokens[:start], tokens[start:end]))
    assert sorted(trained) == sorted(seen)
    assert len(rollouts) <= 1 + TURNS // 3, "only questions begin sequences"
