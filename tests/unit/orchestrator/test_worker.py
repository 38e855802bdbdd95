"""The environment worker with FakeEngine, real verifiers, a real tokenizer and real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import verifiers.v1 as vf
from transformers import PreTrainedTokenizerFast
from verifiers.v1.interception import InterceptionServer, server

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import chat
from primeslurm.orchestrator.rollouts.job_protocol import RolloutError
from primeslurm.orchestrator.worker import main
from primeslurm.orchestrator.worker.generate_endpoint import GenerateEndpoint, NoAnswerError
from primeslurm.orchestrator.worker.token_client import serving
from primeslurm.orchestrator.worker.trace_sequences import trainable_traces
from primeslurm.recipe import Recipe
from primeslurm.wire import cache_salt
from primeslurm.wire.names import SERVED_MODEL
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.rollouts import TwoTurns, connected, job_of, rollouts, small_recipe, with_words, worker_of
from tests.support.waiting import wait_until_async


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def test_rollout_has_exactly_the_sampled_tokens(tokenizer: Path) -> None:
    with FakeEngine(tokenizer, mistakes=2, broken=2) as engine:
        engine.version = 3
        (rollout,) = await rollouts(engine, small_recipe(tokenizer))
    (request,) = engine.requests
    assert request["cache_salt"] == "run.1:3" and request["sampling_params"]["temperature"] == 1.0
    assert engine.sessions[0]
    sampled = rollout.token_ids[rollout.mask]
    assert list(rollout.token_ids[: len(request["token_ids"])]) == request["token_ids"]
    assert len(sampled) == len(rollout.token_ids) - len(request["token_ids"])
    assert np.allclose(rollout.logprobs[rollout.mask], [-(i + 1) / 8 for i in range(len(sampled))])
    assert set(rollout.versions[rollout.mask]) == {3} and set(rollout.versions[~rollout.mask]) == {-1}
    assert 0 < rollout.info.reward < 1 and rollout.info.metrics["exact"] == 0.0
    assert not rollout.is_mixed


async def test_router_that_reads_kv_events_does_not_see_the_salt(tokenizer: Path) -> None:
    recipe = small_recipe(tokenizer, inference={"router": {"type": "vllm-router", "policy": "kv_aware"}})
    worker = worker_of(recipe)
    with FakeEngine(tokenizer) as engine:
        engine.version = 3
        worker._addresses = SimpleNamespace(url=lambda router: engine.url)
        async with serving(worker._env) as worker._by_config:
            await worker._rollout(job_of(recipe))
    (request,) = engine.requests
    revealed = json.loads(cache_salt.reveal(json.dumps(request).encode()))
    assert "cache_salt" not in request and revealed["cache_salt"] == "run.1:3"
    assert request["model"] == SERVED_MODEL and request["token_ids"][0] != revealed["token_ids"][0]


async def test_each_token_has_the_version_that_sampled_it(tokenizer: Path) -> None:
    with FakeEngine(tokenizer) as engine:
        engine.version, engine.paused = 3, True

        async def update() -> None:
            await wait_until_async(lambda: engine.requests)
            engine.version, engine.paused = 4, False

        (rollout,), _ = await asyncio.gather(rollouts(engine, small_recipe(tokenizer)), update())
    assert rollout.is_mixed and rollout.oldest_version == 3
    versions = rollout.versions[rollout.mask]
    assert list(versions) == sorted(versions) and set(versions) == {3, 4}


async def test_stale_engine_is_retried_until_the_deadline(tokenizer: Path) -> None:
    with FakeEngine(tokenizer) as engine:
        waiting = asyncio.create_task(rollouts(engine, small_recipe(tokenizer)))
        await asyncio.sleep(1.0)
        assert not waiting.done() and not engine.requests
        engine.version = 0
        await waiting
    orchestrator = {"batch_size": 8, "group_size": 4, "request_timeout_s": 1}
    with pytest.raises(RolloutError, match="generate"):
        await rollouts(engine, small_recipe(tokenizer, orchestrator=orchestrator))


@pytest.mark.parametrize("stable", [True, False])
async def test_turns_extend_the_sampled_tokens_or_branch(tokenizer: Path, tmp_path: Path, stable: bool) -> None:
    if not stable:
        write_tokenizer(tmp_path, answers_end="??")
    made = small_recipe(
        tokenizer if stable else tmp_path,
        trainer={"router_replay": True},
        orchestrator={"batch_size": 8, "group_size": 4, "request_timeout_s": 60, "echo": 0.1},
    )
    with FakeEngine(tokenizer, routed=True) as engine:
        engine.version = 3
        found = await rollouts(engine, made, with_words(TwoTurns), routed=True)
    assert len(found) == (1 if stable else 2)
    first, second = engine.requests
    last = found[-1].token_ids.tolist()
    assert last[: len(second["token_ids"])] == second["token_ids"]
    assert found[-1].info.turns == 2
    if stable:
        assert found[0].token_ids.tolist()[: len(first["token_ids"])] == first["token_ids"]
    assert sum(int(rollout.mask.sum()) for rollout in found) == sum(engine.sampled), (
        "each sampled token is trained once"
    )
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    heard = [rollout.token_ids[rollout.observed] for rollout in found if rollout.observed is not None]
    assert len(heard) == len(found), "all are marked, or none"
    text = fast.decode(np.concatenate(heard)).replace(" ", "")
    assert "again" in text if stable else not text, "a branch that begins with a rewritten conversation answers nothing"
    assert not any((rollout.mask & rollout.observed).any() for rollout in found)
    for rollout in found:  # the last token of an answer is routed only when another turn follows it
        assert rollout.routed_experts is not None and rollout.routed_experts.shape == (len(rollout.token_ids), 3, 2)
        assert rollout.routed_experts[:, 2, 1].tolist() == [*range(len(rollout.token_ids) - 1), 255]


@pytest.mark.parametrize("seq_len", [64, 40], ids=["both turns fit", "the second turn does not fit"])
async def test_harness_records_the_same_trace_with_and_without_http(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, seq_len: int
) -> None:
    episodes: list[vf.Episode] = []
    monkeypatch.setattr(main, "trainable_traces", lambda found: episodes.append(found) or trainable_traces(found))
    clients: list[str] = []
    make = chat.internal_client
    monkeypatch.setattr(chat, "internal_client", lambda *words, **more: clients.append("") or make(*words, **more))
    # Each look at this clock comes after the answers before it have expired.
    clock = itertools.count(0, server.IDEMPOTENCY_CACHE_TTL_SECONDS)
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: next(clock), time=time.time))
    kept: list[int] = []
    unregister = InterceptionServer.unregister

    def note_kept(self: InterceptionServer, secret: str, state_secret: str) -> None:
        kept.append(len(self.sessions[secret].idempotent_requests))
        unregister(self, secret, state_secret)

    monkeypatch.setattr(InterceptionServer, "unregister", note_kept)
    found = []
    for servers, over_http in ((chat.servers_in_process, 0), (WeakSet(), 2)):
        monkeypatch.setattr(chat, "servers_in_process", servers)
        with FakeEngine(tokenizer) as engine:
            engine.version = 3
            found += await rollouts(engine, small_recipe(tokenizer, seq_len=seq_len), with_words(TwoTurns))
        assert len(clients) == over_http
    assert kept == [0, 0], "expired answers are freed"
    local, http = found
    assert local.token_ids.tolist() == http.token_ids.tolist() and local.versions.tolist() == http.versions.tolist()
    (local_trace,), (http_trace,) = (_without_ids_and_times(episode) for episode in episodes)
    assert local_trace == http_trace and local_trace["stop_condition"]
    assert [call["error"] is None for call in local_trace["calls"]] == [True, seq_len == 64]


def _without_ids_and_times(episode: vf.Episode) -> list[dict[str, Any]]:
    def strip(item: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in item.items() if name not in ("id", "time", "timestamp", "timing")}

    return [json.loads(trace.model_dump_json(), object_hook=strip) for trace in episode.traces]


async def test_answer_without_routed_experts_is_refused(tokenizer: Path) -> None:
    with FakeEngine(tokenizer) as engine:
        engine.version = 3
        endpoint = GenerateEndpoint(lambda: engine.url, 64, timeout_s=5, routed=True)
        with pytest.raises(NoAnswerError, match="--enable-return-routed-experts"):
            await endpoint.generate({"token_ids": endpoint_prompt(tokenizer), "sampling_params": {}}, {})
        await endpoint.close()


async def test_request_follows_its_router_to_another_node(tokenizer: Path) -> None:
    made = small_recipe(tokenizer, orchestrator={"batch_size": 8, "group_size": 4, "request_timeout_s": 60})
    silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    with FakeEngine(tokenizer) as engine:
        engine.version = 3
        host, port = silent.sockets[0].getsockname()
        urls = [f"http://{host}:{port}"]
        endpoint = GenerateEndpoint(lambda: urls[-1], made.max_len, timeout_s=60)
        body = {"token_ids": endpoint_prompt(tokenizer), "sampling_params": {}}
        request = asyncio.create_task(endpoint.generate(body, {"X-Session-ID": "s"}))
        await asyncio.sleep(0.2)
        assert not request.done()
        urls.append(engine.url)
        await request
        assert len(engine.requests) == 1
        await endpoint.close()
    silent.close()


def endpoint_prompt(tokenizer: Path) -> list[int]:
    """Token ids of a prompt that FakeEngine answers."""
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    return list(fast("Reverse: abc")["input_ids"])


async def test_worker_runs_the_chosen_task_with_the_environments_sampling(tokenizer: Path) -> None:
    options = {"id": "reverse-text", "args": {"n": 40}, "sampling": {"temperature": 0.5, "max_tokens": 9}}
    made = small_recipe(tokenizer, environments=[{**options, "curriculum": {}}])
    tasks = [task.data.answer for task in environments.load("reverse-text", {"n": 40}).taskset]
    worker = worker_of(made)
    other = worker_of(small_recipe(tokenizer, environments=[options]))
    assert (worker._runner._tasks, other._runner._tasks) == (40, None)
    assert worker._tasks.task(17).data.answer == tasks[17]
    with FakeEngine(tokenizer) as engine:
        engine.version = 3
        async with connected(worker, engine, made):
            for task in (17, 3):
                await worker._rollout(job_of(made, task))
    assert [request["sampling_params"]["temperature"] for request in engine.requests] == [0.5, 0.5]
    assert [request["sampling_params"]["max_tokens"] for request in engine.requests] == [9, 9]
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    for request, task in zip(engine.requests, (17, 3), strict=True):
        prompt = fast.decode(request["token_ids"]).replace(" ", "")
        assert f"Reverse:{tasks[task][::-1]}" in prompt


def test_recipe_without_shuffle_keeps_its_order(tokenizer: Path) -> None:
    now = small_recipe(tokenizer, environments=[{"id": "reverse-text", "args": {"n": 40}}])
    tasks = [task.data.answer for task in environments.load("reverse-text", {"n": 40}).taskset]
    then, resolved = now.model_dump(mode="json", by_alias=True), now.model_dump_json(by_alias=True)
    del then["environments"][0]["shuffle"]
    orders = []
    for text in (json.dumps(then), resolved):
        worker = worker_of(Recipe.model_validate_json(text))
        orders.append([worker._tasks[position].data.answer for position in range(40)])
    assert orders[0] == tasks and orders[1] != tasks and sorted(orders[1]) == sorted(tasks)
    path = Path(__file__).resolve().parents[2] / "data" / "run_of_0_1_0" / "recipe.resolved.json"
    assert "shuffle" not in Recipe.model_validate_json(path.read_bytes()).environments[0].model_fields_set


@pytest.mark.parametrize("session_header", [{}, {"x-session-id": "group_id"}], ids=["default", "replaced"])
async def test_requests_have_the_headers_that_the_recipe_fills_from_the_rollout(
    tokenizer: Path, session_header: dict[str, str]
) -> None:
    names = {
        "X-Group": "group_id",
        "X-Rollout": "rollout_id",
        "X-Example": "example_id",
        "X-Environment": "environment",
    }
    headers = {**names, "X-Trace": "trajectory_id", **session_header}
    options = {"batch_size": 8, "group_size": 4, "extra_headers_from_state": headers}
    made = small_recipe(tokenizer, environments=[{"id": "reverse-text", "name": "größe"}], orchestrator=options)
    with FakeEngine(tokenizer, broken=1) as engine:
        engine.version = 3
        found = await rollouts(engine, made, with_words(TwoTurns))
    assert found and len(engine.headers) == 2
    for sent in engine.headers:
        assert (sent["x-group"], sent["x-rollout"], sent["x-environment"]) == ("g", "j", "gr%C3%B6%C3%9Fe")
        assert sent["x-example"] == "gr%C3%B6%C3%9Fe-00000000" and len(sent["x-trace"]) == 32
        assert sent.getall("x-session-id") == ["g" if session_header else sent["x-trace"]]
        assert sent["content-type"] == "application/json"
