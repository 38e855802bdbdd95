"""Routed experts of real engines equal those of transformers, with P/D and a CPU tier, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from primeslurm.inference.routed_experts import PROMPT_ROWS
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import ROUTED_FROM, Completion, GenerateEndpoint
from primeslurm.plan.commands.command import Command, EngineRole
from primeslurm.recipe import Recipe
from primeslurm.wire.batches import routed_experts
from tests.engine.conftest import ConnectEngine, StartRouter, tiny_recipe
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, generate_with_retries, metric, tokens
from tests.support.models import make_model, publish
from tests.support.processes import EngineForks, Server

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [2, *(3 + i * 7 % 40 for i in range(200))]
NEW_TOKENS = 24
CACHE = 640 * 2 * 2 * 32 * 4
"""Bytes of 640 tokens (keys and values of 2 layers, 1 head of 32 floats): fewer than two long prompts have."""


def replaying(model: Path, role: EngineRole, **inference: Any) -> Command:
    """Return the command of an engine that returns routed experts. A long prompt takes it several steps."""
    given = tiny_recipe(model, max_num_batched_tokens=128, **inference).model_dump(by_alias=True)
    recipe = Recipe.model_validate(given | {"trainer": {"router_replay": True}})
    return engine_command(recipe, "cpu", role, sys.executable)


@pytest.fixture(scope="module")
def engine(engine_forks: EngineForks, model: Path) -> Iterator[Server]:
    engine = engine_forks.start(replaying(model, "engine"))
    engine.wait("/primeslurm/status")
    yield engine
    engine.stop()


def reference_experts(directory: Path, token_ids: list[int]) -> np.ndarray:
    """Return the experts that transformers selects in float32, sorted: [tokens, layers, top_k]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
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
    for answer, length in ((first, len(PROMPT) + NEW_TOKENS), (second, len(conversation) + NEW_TOKENS)):
        experts = answer.routed_experts
        assert experts is not None and experts.dtype == np.uint8
        assert experts.shape == (length - answer.routed_from, 2, 2)
        assert (experts[-1] == 255).all(), "nothing was computed from the last token"
        assert np.array_equal(np.sort(experts[:-1], axis=-1), expected[answer.routed_from : length - 1])


@pytest.fixture(scope="module")
def pair(engine_forks: EngineForks, model: Path) -> Iterator[tuple[Server, Server]]:
    """Return a prefill engine with a small cache and a CPU tier, and a decode engine."""
    tier = {"type": "native", "cpu": {"bytes": 2**21}}
    small = {"kv_cache_bytes": CACHE, "vllm_extra": {"max_model_len": 512}, "kv_offload": tier}
    prefill, decode = (engine_forks.start(replaying(model, role, **small)) for role in ("prefill", "decode"))
    for server in (prefill, decode):
        server.wait("/primeslurm/status")
    yield prefill, decode
    for server in (prefill, decode):
        server.stop()


def rows(answer: dict[str, Any], length: int) -> np.ndarray:
    """Return the routed experts in an answer, for this number of tokens."""
    return routed_experts.from_npy(answer["choices"][0]["routed_experts"].encode(), length)


async def test_prefill_and_decode_engines_return_the_experts_of_a_plain_engine(
    engine: Server, pair: tuple[Server, Server], client: ConnectEngine, open_router: StartRouter, tmp_path: Path
) -> None:
    policy = PolicyVersion(2, str(publish(make_model(tmp_path / "policy", seed=7), tmp_path, 2)))
    for server in (engine, *pair):
        await client(server).apply(policy, timeout_s=600)
    prefill, decode = pair
    router = open_router(prefill=[prefill], decode=[decode])
    router.wait("/health")
    generate_with_retries(router.url, PROMPT[:9], 2, session="s")
    fresh = iter(range(100))

    def check(prompt: list[int], start: int) -> list[int]:
        """Return the tokens that the pair samples, after comparing it with an engine that computes the whole prompt."""
        options = {"routed_experts_prompt_start": start, "session": "s"}
        plain = generate(engine.url, prompt, NEW_TOKENS, salt=f"fresh-{next(fresh)}", **options)
        answer = generate(router.url, prompt, NEW_TOKENS, salt="s", **options)
        assert tokens(answer) == tokens(plain)
        length = len(prompt) + NEW_TOKENS - 1 - start
        assert np.array_equal(rows(answer, length), rows(plain, length))
        assert rows(plain, length).max() < 8
        return tokens(answer)

    first = PROMPT + check(PROMPT, 0)
    check(first + PROMPT[:100], len(first) - 1)  # the next turn returns only its own rows
    hits = metric(prefill.url, "vllm:prefix_cache_hits_total")
    check(PROMPT, 0)
    check(PROMPT, len(PROMPT))
    assert metric(prefill.url, "vllm:prefix_cache_hits_total") > hits

    for shift in (3, 9, 11, 13):
        check([2 + (i * shift) % 40 for i in range(321)], 0)  # more blocks than the cache has
    hits = metric(prefill.url, "vllm:external_prefix_cache_hits_total")
    check(PROMPT, 0)
    assert metric(prefill.url, "vllm:external_prefix_cache_hits_total") > hits


async def test_unknown_experts_of_a_prompt_are_marked(engine: Server, pair: tuple[Server, Server]) -> None:
    prefill, decode = pair
    prompt = PROMPT[::-1]
    answer = generate(prefill.url, prompt, 1, salt="u", transfer={"do_remote_decode": True, "do_remote_prefill": False})
    transfer = answer["kv_transfer_params"]
    assert answer["choices"][0]["routed_experts"] is None and transfer.pop(PROMPT_ROWS)
    answer = generate(decode.url, prompt, NEW_TOKENS, salt="u", transfer=transfer)
    length, last = len(prompt) + NEW_TOKENS - 1, len(prompt) - 1
    plain = rows(generate(engine.url, prompt, NEW_TOKENS, salt="u"), length)
    assert (rows(answer, length)[:last] == 255).all()
    assert np.array_equal(rows(answer, length)[last:], plain[last:])
