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
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3_5TextConfig

from primeslurm.orchestrator.telemetry.engine_load import parse
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
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
from tests.trainer.families import Case, case, with_layers, write_drafting

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [2, *[5, 9, 14, 7] * 5]
NEW_TOKENS = 100
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

    await asyncio.gather(*(check([*PROMPT, 20 + i], temperature) for i in range(2) for temperature in (0.0, 1.0)))
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
        accepted = counted(engine, "accepted") - accepted
        assert 0 < accepted < counted(engine, "drafted") - drafted
    await check_experts(engine, policy, "rows")


@pytest.mark.campaign
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


SIZES = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
REST = {"initializer_range": 0.2, "max_position_embeddings": 8192}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 0}
NETS = {
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_num_value_heads": 4, "linear_value_head_dim": 64},
    **{"layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False},
}
GLM = case("glm4_moe", Glm4MoeConfig, SIZES, HEADS, REST, EXPERTS)
QWEN = case("qwen3_5_text", Qwen3_5TextConfig, SIZES, HEADS, REST, NETS)


def make_policy(drafting: Case, directory: Path, letter: str = "") -> Path:
    """Write a policy as a trainer does, without draft layer: a random one, or one that always predicts a letter."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(with_layers(drafting, 2), dtype=torch.float32)
    if letter:
        make_constant(model, letter)
    model.save_pretrained(directory)
    return directory


def draft_layer(tensors: dict[str, torch.Tensor], sign: int) -> dict[str, torch.Tensor]:
    """Return the draft layer among `tensors`, made to pass on the embedding of the last token, or its negative."""
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith(("model.layers.2.", "mtp."))}
    for name, tensor in layer.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            layer[name] = torch.zeros_like(tensor)
        elif name.endswith(("eh_proj.weight", "fc.weight")):
            layer[name] = torch.cat((sign * torch.eye(64), torch.zeros(64, 64)), dim=1)
    return layer


@pytest.mark.parametrize(
    "drafting", [GLM, pytest.param(QWEN, marks=pytest.mark.campaign)], ids=lambda drafting: drafting.name
)
async def test_update_replaces_the_draft_layer_only_by_one_of_the_policy(
    drafting: Case, engine_forks: EngineForks, client: ConnectEngine, tmp_path: Path
) -> None:
    if drafting is QWEN:
        pytest.importorskip("torchvision", reason="vLLM's models that see images need it", exc_type=ImportError)
    drafts = {"method": "mtp", "num_tokens": 2}
    checkpoint = write_drafting(drafting, tmp_path / "checkpoint")
    make_tokenizer(checkpoint)
    trained: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        trained |= tensors
        save_file(tensors | draft_layer(tensors, 1), file, metadata={"format": "pt"})
    if drafting is GLM:
        engine, tolerance = start_drafting(engine_forks, checkpoint, drafts), 1e-4
    else:
        # vLLM's delta nets compute in bfloat16 on CPUs, and need Triton to cache prefixes.
        recipe = tiny_recipe(checkpoint, speculative=drafts, vllm_extra={"enable_prefix_caching": False})
        model = recipe.model.model_copy(update={"dtype": "bfloat16"})
        command = engine_command(recipe.model_copy(update={"model": model}), "cpu", "engine", sys.executable)
        engine, tolerance = engine_forks.start(command), 0.3
        engine.wait("/primeslurm/status")
    try:
        control = client(engine)
        random = make_policy(drafting, tmp_path / "random")
        await control.apply(PolicyVersion(1, str(publish(random, tmp_path, 1))), timeout_s=600)
        for temperature in (0.0, 1.0):
            answer = generate(engine.url, PROMPT, 60, temperature=temperature, seed=5)
            check_sampled_by(random, PROMPT, answer, tolerance)
        if drafting is GLM:
            await check_experts(engine, random, "mtp")
        assert counted(engine, "accepted") < counted(engine, "drafted")

        # None: the policy has no draft layer. All drafts of the layer with -1 are wrong.
        for version, sign in ((2, None), (3, -1), (4, None), (5, 1)):
            letter = "ab"[version % 2]
            policy = make_policy(drafting, tmp_path / f"{version}", letter)
            if sign is not None:
                save_file(draft_layer(trained, sign), policy / "draft.safetensors", metadata={"format": "pt"})
            await control.apply(PolicyVersion(version, str(publish(policy, tmp_path, version))), timeout_s=600)
            drafted, accepted = counted(engine, "drafted"), counted(engine, "accepted")
            assert tokens(generate(engine.url, PROMPT, 60)) == [token_id(letter)] * 60
            drafted, accepted = counted(engine, "drafted") - drafted, counted(engine, "accepted") - accepted
            assert drafted > 30
            assert accepted == (0 if version in (3, 4) else drafted)
    finally:
        engine.stop()
