"""Weight updates of LoRA runs on a real engine: exact, in place, and during generation."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, EngineUpdateError, PolicyVersion, Step
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Lora
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components import lora as adapters
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.names import ADAPTER
from scripts.models import tiny_model
from tests.engine.conftest import STATUS_S, tiny_recipe
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, logprobs, metric, spans, tokens
from tests.support.processes import EngineForks, Server

pytestmark = pytest.mark.engine
PROMPT = [2, 5, 9, 14, 7, 3, 21]
LORA = {"rank": 8, "alpha": 16.0, "engines": "adapter"}  # on all layers, most of which vLLM fuses


@pytest.fixture(scope="module", params=["qwen3", pytest.param("llama", marks=pytest.mark.campaign)])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return policy version 0."""
    directory = tmp_path_factory.mktemp("source") / request.param
    if request.param == "qwen3":
        tiny_model.write_model(directory, "qwen3")
        return directory
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": tiny_model.VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "attention_bias": True}
    positions = {"max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **positions, initializer_range=0.2)).save_pretrained(directory)
    tiny_model.tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def recipe(source: Path) -> Recipe:
    asked = tiny_recipe(source)
    return asked.model_copy(update={"trainer": asked.trainer.model_copy(update={"lora": Lora.model_validate(LORA)})})


@pytest.fixture(scope="module")
def engine(engine_forks: EngineForks, recipe: Recipe) -> Iterator[Server]:
    """Yield one engine per model. Every test updates it to the version that it needs."""
    server = engine_forks.start(engine_command(recipe, "cpu", "engine", sys.executable))
    server.wait("/primeslurm/status")
    yield server
    server.stop()


@pytest.fixture
def control(engine: Server, source: Path) -> EngineClient:
    return EngineClient(lambda: engine.url, str(source), status_timeout_s=STATUS_S, adapter=True)


@pytest.fixture(scope="module")
def policy(recipe: Recipe, world: World) -> PolicyModel:
    return build(recipe, world)


def publish(policy: PolicyModel, run_dir: Path, version: int, world: World) -> PolicyVersion:
    """Publish new random adapters."""
    torch.manual_seed(version)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name.endswith(adapters.B):
                parameter.normal_(std=0.3)
    publisher = Publisher(policy, run_dir, Encoding(torch.float32), 9, world, only_adapter=True)
    return PolicyVersion(version, str(publisher.publish(version)))


def difference(policy: PolicyModel, answer: dict[str, Any]) -> float:
    """Return the largest difference between an engine's and a trainer's log-probabilities."""
    ids = torch.tensor([PROMPT + tokens(answer)])
    with torch.no_grad():
        logits = policy.logits(ids, torch.arange(ids.shape[1])[None])[0][0]
    trained = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).squeeze(1)[len(PROMPT) - 1 :]
    return float((trained - torch.tensor(logprobs(answer))).abs().max())


def sample(engine: Server, version: int, count: int = 24) -> dict[str, Any]:
    return generate(engine.url, PROMPT, count, salt=f"exact:{version}", model=ADAPTER, temperature=1.0, seed=5)


async def test_engine_samples_from_the_trainers_adapters(
    engine: Server, control: EngineClient, policy: PolicyModel, source: Path, world: World, tmp_path: Path
) -> None:
    assert await control.apply(PolicyVersion(0, str(source)), 600) is Step.UPDATE
    assert difference(policy, sample(engine, 0)) < 1e-4, "version 0 has no adapter"
    for version in (1, 2):
        published = publish(policy, tmp_path, version, world)
        if version > 1:
            assert difference(policy, sample(engine, 1)) > 0.1, "an adapter changes the policy"
        assert await control.apply(published, 600) is Step.UPDATE
        answer = sample(engine, version)
        assert difference(policy, answer) < 1e-4
        assert spans(answer) == [(version, 0, 24)]
    files = {path.name for path in Path(published.path).iterdir()}
    assert files == {"MANIFEST.json", "adapter_config.json", "adapter_model.safetensors"}, "no base weights"


@pytest.mark.parametrize("source", ["qwen3"], indirect=True)
async def test_running_requests_continue_with_the_new_adapter(
    engine: Server, control: EngineClient, policy: PolicyModel, world: World, tmp_path: Path
) -> None:
    versions = {version: publish(policy, tmp_path, version, world) for version in (3, 4)}
    await control.apply(versions[3], 600)
    running = asyncio.gather(*(asyncio.to_thread(sample, engine, 3, 1000) for _ in range(4)))
    while metric(engine.url, "vllm:num_requests_running") < 4:
        await asyncio.sleep(0.02)
    begun = metric(engine.url, "vllm:generation_tokens_total")
    while metric(engine.url, "vllm:generation_tokens_total") < begun + 100:
        await asyncio.sleep(0.02)
    await control.apply(versions[4], 600)
    for answer in await running:
        (old, start, boundary), (new, _, end) = spans(answer)
        assert (old, new, start, end) == (3, 4, 0, 1000) and boundary > 0
    assert metric(engine.url, "vllm:num_preemptions_total") == 0
    assert difference(policy, sample(engine, 4)) < 1e-4


@pytest.mark.parametrize("source", ["qwen3"], indirect=True)
async def test_a_damaged_adapter_closes_the_gate_and_a_sound_one_reopens_it(
    engine: Server, control: EngineClient, policy: PolicyModel, world: World, tmp_path: Path
) -> None:
    damaged, sound = (publish(policy, tmp_path, version, world) for version in (5, 6))
    path = Path(damaged.path) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"layers.1.self_attn.q", b"layers.7.self_attn.q"))
    with pytest.raises(EngineUpdateError, match="no layer for"):
        await control.apply(damaged, 600)
    assert engine.status_code("/health") == 503
    await control.apply(sound, 600)
    assert engine.status_code("/health") == 200
    assert difference(policy, sample(engine, 6)) < 1e-4
