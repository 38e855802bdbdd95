"""A vision-language engine loads a new policy, and the trainer trains on that policy's rollouts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.worker.main import Worker
from primeslurm.orchestrator.worker.token_client import TokenClient, serving
from primeslurm.recipe import Recipe
from primeslurm.records.journal import Journal
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.transport.addresses import AddressBook
from tests.engine.conftest import STATUS_S, ConnectEngine, StartRouter, tiny_engine
from tests.support import looking
from tests.support.batches import batch_of
from tests.support.generate import generate, logprobs, tokens
from tests.support.models import publish
from tests.support.processes import EngineForks, Server
from tests.support.vision_models import image_token, make_vision_model, reference_logprobs

pytest.importorskip("torchvision", reason="vLLM's models that see images need it", exc_type=ImportError)
pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [5, 9, 14, 7, 33, 21]
ROUTER = "router-0"
FEW = {"limit_mm_per_prompt": {"image": 1, "video": 0}}


def recipe_of(model: Path, **options: Any) -> Recipe:
    """Return an RL recipe with the image environment."""
    return Recipe.model_validate(
        {
            "name": "test",
            "seq_len": 256,
            "model": {"path": str(model), "vlm": {}, **options},
            "environments": [{"id": "looking"}],
            "orchestrator": {"batch_size": 1, "group_size": 1, "sampling": {"max_tokens": 8}},
        }
    )


async def look(router: Server, model: Path, images: Path) -> Rollout:
    """Return one rollout of the image environment."""
    sys.modules["looking"] = looking
    recipe = recipe_of(model)
    worker = Worker(recipe, recipe.environments[0], 0, "inproc://nobody", AddressBook(Path("/nowhere")), images)
    async with serving(worker._env) as clients:
        client = TokenClient(ROUTER, lambda: router.url, str(model), recipe.max_len, 60, images=True)
        worker._clients[ROUTER] = clients[client.key] = client
        (rollout,) = await worker._rollout(Job("j", "g", "looking", 0, 1, ROUTER, "run.1:1"))
        await client.endpoint.close()
    return rollout


def train(rollout: Rollout, model: Path, world: World, directory: Path) -> dict[str, float]:
    """Train a step on one rollout and a copy with another reward."""
    recipe = recipe_of(model, dtype="float32")
    worse = replace(rollout, info=msgspec.structs.replace(rollout.info, reward=rollout.info.reward - 1))
    batches = Batches(recipe, algorithms.from_recipe(recipe))
    batches.add(2, [RolloutGroup("g", "looking", 0, 1, ((rollout,), (worse,)))])
    batch = batch_of(batches, 2)
    assert batch is not None
    train_step = TrainStep(build(recipe, world), recipe, world, ImageReader(model, image_token(model)))
    return train_step.train(batch, PhaseTimer(Journal(directory, "trainer"), record=False))


def assert_sampled_by(rollout: Rollout, model: Path, tokenizer: Path) -> None:
    """Check that its log-probabilities equal those of transformers."""
    (image,) = rollout.info.images
    pixels, grid = ImageReader(tokenizer, image_token(tokenizer)).read(image)
    seen = [0.0, *reference_logprobs(model, rollout.token_ids.tolist(), pixels, grid)]
    assert rollout.mask.any()
    np.testing.assert_allclose(rollout.logprobs[rollout.mask], np.array(seen)[rollout.mask], atol=1e-4)


async def test_trained_encoder_encodes_images_again_after_an_update(
    engine_forks: EngineForks, open_router: StartRouter, tmp_path: Path
) -> None:
    models = [make_vision_model(tmp_path / f"m{seed}", seed) for seed in (0, 1)]
    server = engine_forks.start(tiny_engine(models[0], vllm_extra=FEW), {})
    try:
        server.wait("/primeslurm/status")
        client = EngineClient(lambda: server.url, str(models[0]), status_timeout_s=STATUS_S, trains_encoder=True)
        await client.apply(PolicyVersion(0, str(models[0])), timeout_s=600)
        router = open_router([server])
        router.wait("/health")
        assert_sampled_by(await look(router, models[0], tmp_path / "images"), models[0], models[0])
        await client.apply(PolicyVersion(1, str(publish(models[1], tmp_path, 1))), timeout_s=600)
        assert_sampled_by(await look(router, models[0], tmp_path / "images"), models[1], models[0])
    finally:
        server.stop()


async def test_prefill_engine_encodes_images_for_decode_engine(
    engine_forks: EngineForks, client: ConnectEngine, open_router: StartRouter, tmp_path: Path
) -> None:
    model = make_vision_model(tmp_path / "model", 0)
    servers = [engine_forks.start(tiny_engine(model, role, vllm_extra=FEW), {}) for role in ("prefill", "decode")]
    try:
        for server in servers:
            server.wait("/primeslurm/status")
            await client(server).apply(PolicyVersion(0, str(model)), timeout_s=600)
        router = open_router(prefill=servers[:1], decode=servers[1:])
        router.wait("/health")
        rollout = await look(router, model, tmp_path / "images")
        assert rollout.mask.sum() > 1  # the first token is the prefill engine's, the others are the decode engine's
        assert_sampled_by(rollout, model, model)
    finally:
        for server in servers:
            server.stop()


async def test_updated_engine_agrees_with_the_trainer_on_text_and_images(
    engine_forks: EngineForks, client: ConnectEngine, open_router: StartRouter, world: World, tmp_path: Path
) -> None:
    models = [make_vision_model(tmp_path / f"m{seed}", seed) for seed in (0, 1)]
    policy = PolicyVersion(1, str(publish(models[1], tmp_path, 1)))
    server = engine_forks.start(tiny_engine(models[0], vllm_extra=FEW), {})
    try:
        server.wait("/primeslurm/status")
        await client(server).apply(policy, timeout_s=600)
        answer = generate(server.url, PROMPT, 16, temperature=1.0, seed=5)
        router = open_router([server])
        router.wait("/health")
        rollout = await look(router, models[0], tmp_path / "images")
    finally:
        server.stop()
    expected = reference_logprobs(models[1], PROMPT + tokens(answer))[len(PROMPT) - 1 :]
    assert logprobs(answer) == pytest.approx(expected, abs=1e-4)

    (image,) = rollout.info.images
    assert Path(image.source).parent == tmp_path / "images"
    placeholders = np.flatnonzero(rollout.token_ids == image_token(models[0]))
    assert placeholders.tolist() == list(range(image.start, image.end)) and len(placeholders) == 6
    assert_sampled_by(rollout, models[1], models[0])

    metrics = train(rollout, models[1], world, tmp_path)
    assert metrics["tokens"] == 2 * rollout.mask.sum() and metrics["on_policy_fraction"] == 1
    assert metrics["mismatch_kl"] < 1e-8 and metrics["grad_norm"] > 0
