"""Trained rollouts sample with the parameters of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from renderers import create_renderer
from renderers.base import load_tokenizer

from primeslurm.models.extending_renderer import extending_config
from primeslurm.orchestrator.rendering.renderer_selection import Rendering
from primeslurm.orchestrator.rollouts.job_protocol import Job, RolloutError
from primeslurm.orchestrator.worker.generate_endpoint import GenerateEndpoint
from primeslurm.orchestrator.worker.main import Worker
from primeslurm.orchestrator.worker.token_client import serving
from primeslurm.wire.transport.addresses import AddressBook
from tests.support import fake_engine
from tests.support.conversations import START, ScriptedEngine, answering, rollout, sampled, write_tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.rollouts import small_recipe

PLAIN = {"temperature": 0.7, "top_p": 1.0, "top_k": -1}
CUT = {"top_p": 0.5, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.3, "logit_bias": {"5": 9}, "temperature": 0.1}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("qwen3"), extending_config("qwen3", {}))


async def asked(model: Path, body: dict[str, Any], **options: Any) -> tuple[httpx.Response, list[dict[str, Any]]]:
    """A program's request: what it is answered, and what the engine was asked."""
    config = extending_config("qwen3", {})
    engine = ScriptedEngine([sampled(create_renderer(load_tokenizer(str(model)), config), answering(0))])
    async with engine.serving(), rollout(model, Rendering(config), engine, **options) as (base, secret, _):
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=60, headers=headers, trust_env=False) as program:
            reply = await program.post(f"{base}/v1/chat/completions", json={"model": "m", "messages": START, **body})
    return reply, [request["sampling_params"] for request in engine.requests]


async def test_sampling_parameters_of_programs_do_not_reach_the_engine(qwen3: Path) -> None:
    body = {**CUT, "response_format": {"type": "json_object"}, "bad_words": ["no"], "presence_penalty": 1}
    reply, requests = await asked(qwen3, body, trained=PLAIN, **PLAIN)
    assert reply.is_success, reply.text
    (parameters,) = requests
    assert {name: parameters[name] for name in PLAIN} == PLAIN
    assert parameters.keys() - PLAIN.keys() == {"logprobs", "max_tokens", "skip_special_tokens", "stop_token_ids"}


@pytest.mark.parametrize(("name", "value"), CUT.items())
async def test_environment_with_other_sampling_is_refused(qwen3: Path, name: str, value: Any) -> None:
    reply, requests = await asked(qwen3, {}, trained=PLAIN, **{**PLAIN, name: value})
    assert reply.status_code == 400 and requests == []
    assert f"the environment samples with {name} = {value}: the trainer computes log-probabilities" in reply.text


@pytest.mark.parametrize("options", [{"trained": None}, {"trained": PLAIN, "trainable": False}])
async def test_untrained_agents_choose_their_sampling(qwen3: Path, options: dict[str, Any]) -> None:
    reply, (parameters,) = await asked(qwen3, {}, **options, **CUT)
    assert reply.is_success
    assert {name: parameters[name] for name in CUT} == CUT


async def test_failed_rollout_names_the_changed_parameters(tmp_path: Path) -> None:
    tokenizer = fake_engine.write_tokenizer(tmp_path / "tokenizer")
    environment = {"id": "reverse-text", "args": {"env": {"agent": {"sampling": {"temperature": 0.3, "min_p": 0.1}}}}}
    evaluation = {"environments": [{**environment, "name": "eval"}]}
    made = small_recipe(tokenizer, environments=[environment], evaluation=evaluation)
    with FakeEngine(tokenizer) as engine:
        engine.version = 0
        addresses = AddressBook(tmp_path)
        addresses.url = lambda process: engine.url  # type: ignore[method-assign]
        for which in (*made.environments, *made.evaluation_environments):
            worker = Worker(made, which, 0, "inproc://nobody", addresses, tmp_path)
            job = Job("j", "g", which.label, 0, 0, "router-0", "run.1:0")
            async with serving(worker._env) as worker._by_config:
                if which.label == "eval":
                    assert await worker._rollout(job)
                    continue
                with pytest.raises(RolloutError, match=r"samples with temperature = 0\.3, min_p = 0\.1: the trainer"):
                    await worker._rollout(job)
                assert engine.requests == []
    (request,) = engine.requests
    assert (request["sampling_params"]["temperature"], request["sampling_params"]["min_p"]) == (0.3, 0.1)


@pytest.mark.parametrize("images", [{}, {"content_parts": [{"type": "image_url", "url": "data:,"}]}])
@pytest.mark.parametrize(("asked_for", "sent"), [(None, 96), (7, 7), (1000, 96)])
async def test_requests_always_have_max_tokens(images: dict[str, Any], asked_for: int | None, sent: int) -> None:
    engine = ScriptedEngine([[5]])
    endpoint = GenerateEndpoint(lambda: engine.url, 100, 60)
    sampling = {} if asked_for is None else {"max_tokens": asked_for}
    async with engine.serving():
        await endpoint.generate({"token_ids": [1, 2, 3, 4], "sampling_params": sampling, **images}, {})
    await endpoint.close()
    (request,) = engine.requests
    assert request["sampling_params"]["max_tokens"] == sent
