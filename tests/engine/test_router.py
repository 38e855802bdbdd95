"""Real engines behind the real vllm-router."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import httpx
import pytest

from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.recipe.sections.routers import VllmRouter
from tests.engine.conftest import ConnectEngine, StartEngine, StartRouter
from tests.support.generate import generate, generate_with_retries, metric, spans, tokens
from tests.support.kept_kv import kv_given_up, update_while_kv_is_kept
from tests.support.models import check_sampled_by, make_model, publish
from tests.support.waiting import wait_until_async

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [2, 5, 9, 14, 7, 3, 21]


@pytest.mark.campaign
async def test_every_policy_serves_and_a_restarted_engine_only_the_current_version(
    start_engine: StartEngine, client: ConnectEngine, open_router: StartRouter, tmp_path: Path
) -> None:
    engines = [start_engine(), start_engine()]
    policy = PolicyVersion(1, str(publish(make_model(tmp_path / "m", seed=1), tmp_path, 1)))
    router = open_router(engines=engines)  # started while both are closed
    await asyncio.gather(*(client(engine).apply(policy, 600) for engine in engines))
    router.wait("/health")
    for balancing in get_args(VllmRouter.model_fields["policy"].annotation):
        if balancing == "kv_aware":
            continue  # test_kv_events.py
        other = open_router(engines=engines, policy=balancing)
        other.wait("/health", timeout_s=600)
        assert len(tokens(generate(other.url, PROMPT, 2, session="s"))) == 2
        other.stop()

    by_session = {f"s{i}": set() for i in range(12)}
    for session, served_by in by_session.items():
        for _ in range(3):
            before = [metric(e.url, "vllm:request_success_total") for e in engines]
            generate(router.url, PROMPT, 2, session=session)
            after = [metric(e.url, "vllm:request_success_total") for e in engines]
            served_by.add(next(i for i in (0, 1) if after[i] > before[i]))
    assert all(len(served_by) == 1 for served_by in by_session.values())  # a session stays on its engine
    assert set().union(*by_session.values()) == {0, 1}

    engines[0].kill()
    assert all(spans(generate_with_retries(router.url, PROMPT, 4, session=f"s{i}")) == [(1, 0, 4)] for i in range(6))
    restarted = start_engine(http=int(engines[0].url.rpartition(":")[2]))
    await asyncio.sleep(2.5)  # the router has checked it by now
    for i in range(12):
        assert spans(generate_with_retries(router.url, PROMPT, 4, session=f"s{i}")) == [(1, 0, 4)]
    assert metric(restarted.url, "vllm:request_success_total") == 0

    await client(restarted).apply(policy, 600)
    moved = [s for s, served_by in by_session.items() if served_by == {0}]

    def returned() -> bool:
        assert spans(generate_with_retries(router.url, PROMPT, 4, session=moved[0])) == [(1, 0, 4)]
        return metric(restarted.url, "vllm:request_success_total") > 0

    await wait_until_async(returned)


@pytest.mark.campaign
async def test_prefill_and_decode_engines_answer_as_one(
    start_engine: StartEngine, client: ConnectEngine, open_router: StartRouter, model: Path, tmp_path: Path
) -> None:
    prefill, decode = pair = start_engine("prefill"), start_engine("decode")
    router = open_router(prefill=[prefill], decode=[decode])  # started while both are closed
    await asyncio.sleep(1)
    assert router.status_code("/liveness") is None  # the router does not listen before its engines are open
    prompts = [[3 + (i * k) % 40 for i in range(1, 90)] for k in (1, 3, 7)]
    for version in (0, 1):
        weights = model if version == 0 else make_model(tmp_path / "m", seed=1)
        path = model if version == 0 else publish(weights, tmp_path, 1)
        await asyncio.gather(*(client(engine).apply(PolicyVersion(version, str(path)), 600) for engine in pair))
        generate_with_retries(router.url, PROMPT, 4, session="warm-up")
        for prompt in prompts:
            through = generate(router.url, prompt, 16, salt=f"v{version}", session="s")
            check_sampled_by(weights, prompt, through)
            assert spans(through) == [(version, 0, 16)]
    assert metric(decode.url, "vllm:nixl_bytes_transferred_count") >= 6

    path = publish(make_model(tmp_path / "m2", seed=2), tmp_path, 2)
    policy = PolicyVersion(2, str(path))
    completion = await update_while_kv_is_kept([prefill], [decode], router, client, policy, prompts[0][::-1])
    assert spans(completion) == [(1, 0, 0), (2, 0, 8)] and kv_given_up([prefill]) == 0

    port = int(decode.url.rpartition(":")[2])
    decode.kill()
    restarted = start_engine("decode", http=port)
    with pytest.raises(httpx.HTTPStatusError):
        generate(router.url, prompts[0], 2)
    assert metric(restarted.url, "vllm:request_success_total") == 0
    await client(restarted).apply(policy, 600)
    assert spans(generate_with_retries(router.url, PROMPT, 4, session="s")) == [(2, 0, 4)]
