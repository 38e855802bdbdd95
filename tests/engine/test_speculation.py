"""Speculative decoding on a real engine: the policy's log-probabilities and routed experts, across a weight update."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from benchmarks.support.draft_layers import write_checkpoint
from primeslurm.orchestrator.telemetry.engine_load import parse
from primeslurm.orchestrator.weight_transfer.engine_client import PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import ROUTED_FROM, GenerateEndpoint
from primeslurm.recipe import Recipe
from tests.engine.conftest import ConnectEngine, tiny_recipe
from tests.engine.test_routed_experts import reference_experts
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, spans, tokens
from tests.support.models import (
    check_sampled_by,
    make_constant,
    make_constant_model,
    make_model,
    make_tokenizer,
    publish,
    token_id,
)
from tests.support.processes import EngineForks, Server

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [2, *[5, 9, 14, 7] * 5]
NEW_TOKENS = 200
NGRAM = {"method": "ngram", "num_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def counted(engine: Server, name: str) -> float:
    """Return one value of the engine's load, as the orchestrator reads it."""
    return parse(httpx.get(f"{engine.url}/metrics").text)[name]


def start_drafting(engine_forks: EngineForks, model: Path, drafts: dict[str, object]) -> Server:
    """Start an engine that drafts tokens and returns routed experts."""
    given = tiny_recipe(model, speculative=drafts).model_dump(by_alias=True)
    recipe = Recipe.model_validate(given | {"trainer": {"router_replay": True}})
    engine = engine_forks.start(engine_command(recipe, "cpu", "engine", sys.executable))
    engine.wait("/primeslurm/status")
    return engine


@pytest.fixture(scope="module")
def engine(engine_forks: EngineForks, model: Path) -> Iterator[Server]:
    engine = start_drafting(engine_forks, model, NGRAM)
    yield engine
    engine.stop()


async def check_experts(engine: Server, policy: Path, salt: str) -> None:
    """Check the routed experts of requests that run at the same time."""
    endpoint = GenerateEndpoint(lambda: engine.url, 4096, timeout_s=300, routed=True)

    async def check(prompt: list[int], temperature: float) -> None:
        async def sample(token_ids: list[int], count: int, salt: str) -> tuple[list[int], np.ndarray]:
            sampling = {"max_tokens": count, "temperature": temperature, "ignore_eos": True, ROUTED_FROM: 0}
            body = {"token_ids": token_ids, "cache_salt": salt, "sampling_params": sampling}
            answer = await endpoint.generate(body, {})
            assert answer.routed_experts is not None
            return token_ids + answer.token_ids, answer.routed_experts

        ids, rows = await sample(prompt, 60, salt)
        rows = rows[: len(ids) - 1]
        # The same tokens as a prompt, which has no drafts: computed anew, and from the rows that the cache stores.
        for again in (f"{salt}:new", salt):
            np.testing.assert_array_equal((await sample(ids, 1, again))[1][: len(rows)], rows)
        np.testing.assert_array_equal(np.sort(rows, -1), reference_experts(policy, ids)[:-1])

    await asyncio.gather(*(check([*PROMPT, 20 + i], temperature) for i in range(3) for temperature in (0.0, 1.0)))
    await endpoint.close()


async def test_log_probabilities_and_experts_are_those_of_the_policy(
    engine: Server, client: ConnectEngine, tmp_path: Path
) -> None:
    for version in (1, 2):
        policy = make_model(tmp_path / f"policy-{version}", seed=version)
        await client(engine).apply(PolicyVersion(version, str(publish(policy, tmp_path, version))), timeout_s=600)
        drafted, accepted = counted(engine, "drafted"), counted(engine, "accepted")
        for temperature in (0.0, 1.0):
            sampling = {"temperature": temperature, "seed": 5, "salt": f"s:{version}:{temperature}"}
            check_sampled_by(policy, PROMPT, generate(engine.url, PROMPT, NEW_TOKENS, **sampling))
        await check_experts(engine, policy, f"rows:{version}")
        accepted = counted(engine, "accepted") - accepted
        assert 0 < accepted < counted(engine, "drafted") - drafted


async def test_drafts_of_the_old_policy_are_refused_by_the_new_one(
    engine: Server, client: ConnectEngine, tmp_path: Path
) -> None:
    control = client(engine)
    for version, letter in ((3, "a"), (4, "b")):
        policy = PolicyVersion(version, str(publish(make_constant_model(tmp_path / letter, letter), tmp_path, version)))
        if version == 4:
            running = asyncio.create_task(asyncio.to_thread(generate, engine.url, PROMPT, 3000))
            begun = counted(engine, "accepted")
            while counted(engine, "accepted") < begun + 300:
                await asyncio.sleep(0.02)
        await control.apply(policy, timeout_s=600)
    answer = await running
    (old, start, boundary), (new, _, end) = spans(answer)
    assert (old, new, start, end) == (3, 4, 0, 3000)
    assert tokens(answer) == [token_id("a")] * boundary + [token_id("b")] * (3000 - boundary)


def glm(layers: int) -> Glm4MoeConfig:
    """Return the config of a tiny GLM-4.5."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 8192}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
    return Glm4MoeConfig(**sizes, **heads, **experts, num_hidden_layers=layers, initializer_range=0.2)


def make_glm(directory: Path, letter: str = "") -> Path:
    """Write a policy as a trainer does, without draft layer: a random one, or one that always predicts a letter."""
    torch.manual_seed(7)
    model = Glm4MoeForCausalLM(glm(2)).to(torch.float32)
    if letter:
        make_constant(model, letter)
    model.save_pretrained(directory)
    return directory


def draft_layer(sign: int) -> dict[str, torch.Tensor]:
    """Return the tensors by which a draft layer passes on the embedding of the last token, or its negative."""
    zeros = {"self_attn.o_proj": (64, 64), "mlp.shared_experts.down_proj": (64, 32)}
    zeros |= {f"mlp.experts.{expert}.down_proj": (64, 32) for expert in range(4)}
    tensors = {f"model.layers.2.{name}.weight": torch.zeros(shape) for name, shape in zeros.items()}
    return tensors | {"model.layers.2.eh_proj.weight": torch.cat((sign * torch.eye(64), torch.zeros(64, 64)), dim=1)}


async def test_update_replaces_the_draft_layer_only_by_one_of_the_policy(
    engine_forks: EngineForks, client: ConnectEngine, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, glm, 2, "float32")
    make_tokenizer(checkpoint)
    trained: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        tensors |= {name: tensor for name, tensor in draft_layer(1).items() if name in tensors}
        save_file(tensors, file, metadata={"format": "pt"})
        trained |= {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    engine = start_drafting(engine_forks, checkpoint, {"method": "mtp", "num_tokens": 2})
    try:
        control = client(engine)
        random = make_glm(tmp_path / "random")
        await control.apply(PolicyVersion(1, str(publish(random, tmp_path, 1))), timeout_s=600)
        for temperature in (0.0, 1.0):
            check_sampled_by(random, PROMPT, generate(engine.url, PROMPT, 60, temperature=temperature, seed=5))
        await check_experts(engine, random, "mtp")
        assert counted(engine, "accepted") < counted(engine, "drafted")

        # None: the policy has no draft layer. All drafts of the layer with -1 are wrong.
        for version, sign in ((2, None), (3, -1), (4, None), (5, 1)):
            letter = "ab"[version % 2]
            policy = make_glm(tmp_path / f"{version}", letter)
            if sign is not None:
                save_file(trained | draft_layer(sign), policy / "draft.safetensors", metadata={"format": "pt"})
            await control.apply(PolicyVersion(version, str(publish(policy, tmp_path, version))), timeout_s=600)
            drafted, accepted = counted(engine, "drafted"), counted(engine, "accepted")
            assert tokens(generate(engine.url, PROMPT, 60)) == [token_id(letter)] * 60
            drafted, accepted = counted(engine, "drafted") - drafted, counted(engine, "accepted") - accepted
            assert drafted > 30
            assert accepted == (0 if version in (3, 4) else drafted)
    finally:
        engine.stop()
