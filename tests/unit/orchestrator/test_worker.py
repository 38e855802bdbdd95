"""The environment worker against FakeEngine: real verifiers, real tokenizer, real HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine, write_tokenizer

from primeslurm.orchestrator.jobs import Job
from primeslurm.orchestrator.worker import Worker
from primeslurm.orchestrator.generate import TokenClient, serving
from primeslurm.recipe import Recipe


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def recipe(tokenizer: Path, **changes: Any) -> Recipe:
    fields = {
        "name": "test",
        "max_steps": 5,
        "seq_len": 64,
        "model": {"path": str(tokenizer)},
        "environments": [{"id": "reverse-text"}],
        "orchestrator": {"batch_size": 8, "group_size": 4, "request_timeout_s": 5},
    }
    return Recipe.model_validate({**fields, **changes})


async def test_rollout_has_exactly_the_sampled_tokens(tokenizer: Path) -> None:
    engine = FakeEngine(tokenizer, mistakes=2, broken=2)
    engine.version = 3
    made = recipe(tokenizer)
    worker = Worker(made, made.environments[0], 0, "inproc://nobody")
    job = Job("j", "g", "reverse-text", 0, 3, engine.url, "run.1:3")
    async with serving(worker._env) as clients:
        client = TokenClient(engine.url, str(tokenizer), made.max_len, 5)
        worker._clients[engine.url] = clients[client.key] = client
        (rollout,) = await worker._rollout(job)
    (request,) = engine.requests
    assert request["cache_salt"] == "run.1:3"
    assert engine.sessions[0]
    sampled = rollout.token_ids[rollout.mask]
    assert list(rollout.token_ids[: len(request["token_ids"])]) == request["token_ids"]
    assert len(sampled) == len(rollout.token_ids) - len(request["token_ids"])
    assert np.allclose(rollout.logprobs[rollout.mask], [-(i + 1) / 8 for i in range(len(sampled))])
    assert set(rollout.versions[rollout.mask]) == {3} and set(rollout.versions[~rollout.mask]) == {-1}
    assert 0 < rollout.info.reward < 1 and rollout.info.metrics["exact"] == 0.0
    engine.stop()
