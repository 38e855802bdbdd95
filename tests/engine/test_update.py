"""Policy updates on a real engine: during generation, exact, atomic and recoverable."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from primeslurm.orchestrator.weight_updates.engine_client import EngineUpdateError, PolicyVersion, Step
from primeslurm.wire.transport import secret
from primeslurm.wire.weight_transfer import filesystem
from tests.engine.conftest import ConnectEngine, StartEngine
from tests.support.generate import generate, metric, spans, tokens
from tests.support.models import (
    check_sampled_by,
    make_constant_model,
    make_model,
    publish,
    publish_delta,
    token_id,
)
from tests.support.processes import Server

pytestmark = pytest.mark.engine
PROMPT = [2, 5, 9, 14, 7, 3, 21]
PolicyOf = Callable[[int], PolicyVersion]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return policies: 1 always says a, 2 always says b, 3 and 4 are random, and 6 is a delta of 3."""
    run_dir = tmp_path_factory.mktemp("run")
    made = tmp_path_factory.mktemp("made")
    sources = {
        1: make_constant_model(made / "a", "a"),
        2: make_constant_model(made / "b", "b"),
        3: make_model(made / "r3", seed=3),
        4: make_model(made / "r4", seed=4),
    }
    for version, source in sources.items():
        publish(source, run_dir, version)
    sources[6] = shutil.copytree(sources[3], made / "r6")
    publish_delta(run_dir, 6, 3, sources[6])
    return sources | {-1: run_dir}


@pytest.fixture
def policy(policies: dict[int, Path]) -> PolicyOf:
    """Return a function that returns the policy of a version."""
    return lambda version: PolicyVersion(version, str(filesystem.version_dir(policies[-1], version)))


async def test_pending_requests_continue_with_the_new_policy(
    engine: Server, client: ConnectEngine, policy: PolicyOf
) -> None:
    control = client(engine)
    await control.apply(policy(1), timeout_s=600)
    requests = [asyncio.to_thread(generate, engine.url, PROMPT, 1000) for _ in range(4)]
    running = asyncio.gather(*requests)
    while metric(engine.url, "vllm:num_requests_running") < 4:
        await asyncio.sleep(0.02)
    begun = metric(engine.url, "vllm:generation_tokens_total")
    while metric(engine.url, "vllm:generation_tokens_total") < begun + 100:
        await asyncio.sleep(0.02)
    assert await control.apply(policy(2), timeout_s=600) is Step.UPDATE
    for answer in await running:
        (old, start, boundary), (new, _, end) = spans(answer)
        assert (old, new, start, end) == (1, 2, 0, 1000)
        assert tokens(answer) == [token_id("a")] * boundary + [token_id("b")] * (1000 - boundary)
    assert metric(engine.url, "vllm:num_preemptions_total") == 0


async def test_logprobs_after_updates_are_those_of_the_new_weights(
    engine: Server, client: ConnectEngine, policy: PolicyOf, policies: dict[int, Path]
) -> None:
    control = client(engine)
    for version in (3, 4, 6):
        await control.apply(policy(version), timeout_s=600)
        answer = generate(engine.url, PROMPT, 24, salt=f"exact:{version}", temperature=1.0, seed=5)
        check_sampled_by(policies[version], PROMPT, answer)


async def test_current_version_is_not_applied_again(engine: Server, client: ConnectEngine, policy: PolicyOf) -> None:
    control = client(engine)
    await control.apply(policy(4), timeout_s=600)
    before = await control.status()
    assert await control.apply(policy(4), timeout_s=600) is Step.NOTHING
    assert await control.status() == before


async def test_a_refused_policy_closes_the_gate_and_a_good_one_reopens_it(
    engine: Server, client: ConnectEngine, policy: PolicyOf, policies: dict[int, Path]
) -> None:
    control = client(engine)
    await control.apply(policy(3), timeout_s=600)
    with pytest.raises(EngineUpdateError, match="version 3"):
        await control.apply(PolicyVersion(5, policy(3).path), timeout_s=600)
    status = await control.status()
    assert status.version is None and status.paused and engine.status_code("/health") == 503

    await control.apply(policy(4), timeout_s=600)
    assert engine.status_code("/health") == 200
    check_sampled_by(policies[4], PROMPT, generate(engine.url, PROMPT, 8, salt="recovered"))


def _without_an_expert(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.2.down_proj.weight"]


def _with_a_wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    # half loaded: k_proj sorts before v_proj, and both fill the same fused layer
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


@pytest.mark.parametrize("damage", [_without_an_expert, _with_a_wrong_shape])
async def test_unfitting_policy_is_refused_without_effect(
    engine: Server,
    client: ConnectEngine,
    policy: PolicyOf,
    policies: dict[int, Path],
    tmp_path: Path,
    damage: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    control = client(engine)
    bad = tmp_path / "bad"
    shutil.copytree(filesystem.version_dir(policies[-1], 3), bad)
    file = next(bad.glob("*.safetensors"))
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    filesystem.complete(bad, 5, "float32")
    with pytest.raises(EngineUpdateError):
        await control.apply(PolicyVersion(5, str(bad)), timeout_s=600)
    assert (await control.status()).version is None

    for version in (4, 3):
        await control.apply(policy(version), timeout_s=600)
        answer = generate(engine.url, PROMPT, 8, salt=f"{damage.__name__}:{version}")
        check_sampled_by(policies[version], PROMPT, answer)


async def test_new_cache_salt_reuses_no_cache(engine: Server, client: ConnectEngine, policy: PolicyOf) -> None:
    await client(engine).apply(policy(3), timeout_s=600)
    prompt = [3 + i % 40 for i in range(400)]

    def hits(salt: str) -> float:
        before = metric(engine.url, "vllm:prefix_cache_hits_total")
        generate(engine.url, prompt, 2, salt=salt)
        return metric(engine.url, "vllm:prefix_cache_hits_total") - before

    assert hits("run.0:3") == 0
    assert hits("run.0:3") >= 256
    assert hits("run.0:2") == 0  # an engine refuses salts of newer versions than its own


async def test_unfinished_update_is_resumed(engine: Server, client: ConnectEngine, policy: PolicyOf) -> None:
    control = client(engine)
    await control.apply(policy(3), timeout_s=600)
    httpx.post(f"{engine.url}/pause?mode=keep&clear_cache=false", headers=secret.header())
    assert (await control.status()).paused
    assert await control.apply(policy(3), timeout_s=600) is Step.RESUME
    assert len(tokens(generate(engine.url, PROMPT, 4))) == 4


@pytest.mark.campaign
async def test_a_tied_head_follows_the_embedding(
    start_engine: StartEngine, client: ConnectEngine, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "tied", seed=7, tied=True)
    target = make_model(tmp_path / "target", seed=8, tied=True)
    engine = start_engine(source=model)
    await client(engine).apply(PolicyVersion(1, str(publish(target, tmp_path, 1))), timeout_s=600)
    answer = generate(engine.url, PROMPT, 8)
    check_sampled_by(target, PROMPT, answer)
