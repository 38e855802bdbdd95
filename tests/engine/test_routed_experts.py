"""Routed experts of a real engine equal those of transformers, as the orchestrator receives them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from primeslurm.orchestrator.weight_transfer.engine_client import PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import ROUTED_FROM, Completion, GenerateEndpoint
from primeslurm.recipe import Recipe
from tests.engine.conftest import ConnectEngine, tiny_recipe
from tests.support.engine_commands import engine_command
from tests.support.models import make_model, publish
from tests.support.processes import EngineForks, Server

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [2, *(3 + i * 7 % 40 for i in range(200))]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def engine(engine_forks: EngineForks, model: Path) -> Iterator[Server]:
    """Return an engine with router replay. A long prompt takes it several steps."""
    given = tiny_recipe(model, max_num_batched_tokens=128).model_dump(by_alias=True)
    recipe = Recipe.model_validate(given | {"trainer": {"router_replay": True}})
    engine = engine_forks.start(engine_command(recipe, "cpu", "engine", sys.executable))
    engine.wait("/primeslurm/status")
    yield engine
    engine.stop()


def reference_experts(directory: Path, token_ids: list[int]) -> np.ndarray:
    """Return the experts that transformers selects in float32, sorted: [tokens, layers, top_k]."""
    model = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    layers = [layer.topk(model.config.num_experts_per_tok).indices for layer in logits]
    return torch.stack(layers, dim=1).sort(-1).values.numpy()


async def test_the_experts_of_every_token_are_returned(engine: Server, client: ConnectEngine, tmp_path: Path) -> None:
    policy = make_model(tmp_path / "policy", seed=5)
    await client(engine).apply(PolicyVersion(1, str(publish(policy, tmp_path, 1))), timeout_s=600)
    endpoint = GenerateEndpoint(lambda: engine.url, 4096, timeout_s=120, routed=True)

    async def sample(prompt: list[int], start: int) -> Completion:
        sampling = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True, ROUTED_FROM: start}
        return await endpoint.generate({"token_ids": prompt, "cache_salt": "s", "sampling_params": sampling}, {})

    first = await sample(PROMPT, 0)
    conversation = [*PROMPT, *first.token_ids, *PROMPT[:50]]
    second = await sample(conversation, len(PROMPT) + NEW_TOKENS - 1)  # its beginning is in the prefix cache
    await endpoint.close()

    expected = reference_experts(policy, conversation + second.token_ids)
    for answer, tokens in ((first, len(PROMPT) + NEW_TOKENS), (second, len(conversation) + NEW_TOKENS)):
        experts = answer.routed_experts
        assert experts is not None and experts.dtype == np.uint8
        assert experts.shape == (tokens - answer.routed_from, 2, 2)
        assert (experts[-1] == 255).all(), "nothing was computed from the last token"
        assert np.array_equal(np.sort(experts[:-1], axis=-1), expected[answer.routed_from : tokens - 1])
