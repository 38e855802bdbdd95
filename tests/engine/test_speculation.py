"""Speculative decoding on a real engine: the policy's log-probabilities and routed experts, across a weight update."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from primeslurm.orchestrator.telemetry.engine_load import parse
from primeslurm.orchestrator.weight_transfer.engine_client import PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import ROUTED_FROM, GenerateEndpoint
from primeslurm.recipe import Recipe
from tests.engine.conftest import ConnectEngine, tiny_recipe
from tests.engine.test_routed_experts import reference_experts
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, spans, tokens
from tests.support.models import check_sampled_by, make_constant_model, make_model, publish, token_id
from tests.support.processes import EngineForks, Server

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [2, *[5, 9, 14, 7] * 5]
NEW_TOKENS = 200
NGRAM = {"method": "ngram", "num_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def counted(engine: Server, name: str) -> float:
    """Return one value of the engine's load, as the orchestrator reads it."""
    return parse(httpx.get(f"{engine.url}/metrics").text)[name]


@pytest.fixture(scope="module")
def engine(engine_forks: EngineForks, model: Path) -> Iterator[Server]:
    given = tiny_recipe(model, speculative=NGRAM).model_dump(by_alias=True)
    recipe = Recipe.model_validate(given | {"trainer": {"router_replay": True}})
    engine = engine_forks.start(engine_command(recipe, "cpu", "engine", sys.executable))
    engine.wait("/primeslurm/status")
    yield engine
    engine.stop()


async def test_log_probabilities_and_experts_are_those_of_the_policy(
    engine: Server, client: ConnectEngine, tmp_path: Path
) -> None:
    endpoint = GenerateEndpoint(lambda: engine.url, 4096, timeout_s=300, routed=True)
    for version in (1, 2):
        policy = make_model(tmp_path / f"policy-{version}", seed=version)
        await client(engine).apply(PolicyVersion(version, str(publish(policy, tmp_path, version))), timeout_s=600)
        drafted, accepted = counted(engine, "drafted"), counted(engine, "accepted")
        for temperature in (0.0, 1.0):
            sampling = {"temperature": temperature, "seed": 5, "salt": f"s:{version}:{temperature}"}
            check_sampled_by(policy, PROMPT, generate(engine.url, PROMPT, NEW_TOKENS, **sampling))
            body = {"max_tokens": NEW_TOKENS, "temperature": temperature, "ignore_eos": True, ROUTED_FROM: 0}
            answer = await endpoint.generate({"token_ids": PROMPT, "sampling_params": body}, {})
            assert answer.routed_experts is not None
            rows = np.sort(answer.routed_experts[: len(PROMPT) + NEW_TOKENS - 1], -1)
            np.testing.assert_array_equal(rows, reference_experts(policy, PROMPT + answer.token_ids)[:-1])
        accepted = counted(engine, "accepted") - accepted
        assert 0 < accepted < counted(engine, "drafted") - drafted
    await endpoint.close()


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
