"""Adapters by name on a real engine, and the Tinker service that samples with it, with the real client."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
import uvicorn

from benchmarks.support.ports import free_port
from primeslurm.base import files
from primeslurm.plan.commands.command import Command
from primeslurm.recipe import Recipe
from primeslurm.tinker.backbone import Adapter, Backbone, Pass
from primeslurm.tinker.engine_sampler import EngineSampler, NoEngineError
from primeslurm.tinker.requests import Datum, LoraConfig, RequestError, SamplingParams
from primeslurm.tinker.routes import application
from primeslurm.tinker.sampler import TrainerSampler
from primeslurm.tinker.server import TinkerServer, prepare
from primeslurm.tinker.service import Service
from primeslurm.tinker.store import FIRST_USER
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.names import ADAPTERS, STATUS_PATH
from primeslurm.wire.transport import secret
from scripts.models import tiny_model
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, logprobs, metric, tokens
from tests.support.processes import EngineForks, Server
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::FutureWarning")]
PROMPT = [*range(5, 105)] * 2  # longer than a block of the prefix cache
LENGTH = 4096
RUNNING, HITS = "vllm:num_requests_running", "vllm:prefix_cache_hits_total"


def adapter_engine(model: str, adapters: Path) -> Command:
    """Return the command of a CPU engine with room for three adapters at a time."""
    recipe = {"name": "adapters", "task": "serve", "seq_len": LENGTH, "inference": {"kv_cache_bytes": 2**26}}
    recipe["model"] = {"path": model, "dtype": "float32"}
    command = engine_command(Recipe.model_validate(recipe), "cpu", "engine", sys.executable)
    options = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "16")
    return command._replace(argv=(*command.argv, *options), env={**command.env, ADAPTERS: str(adapters)})


def random_adapter(backbone: Backbone, seed: int, rank: int = 8) -> Adapter:
    adapter = backbone.adapter(LoraConfig(rank=rank, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return adapter


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory, world: World) -> Backbone:
    directory = tmp_path_factory.mktemp("source") / "qwen3"
    tiny_model.write_model(directory, "qwen3")
    return Backbone(str(directory), 32, world)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> TinkerServer:
    return prepare("127.0.0.1", 0, tmp_path_factory.mktemp("tinker") / "data", ["other"])


@pytest.fixture(scope="module")
def adapters(opened: TinkerServer) -> Path:
    return opened.store.adapters


@pytest.fixture(scope="module")
def engine(engine_forks: EngineForks, backbone: Backbone, adapters: Path) -> Iterator[Server]:
    server = engine_forks.start(adapter_engine(backbone.limits.model, adapters))
    server.wait("/health")
    yield server
    server.stop()


def difference(backbone: Backbone, adapter: Adapter | None, answer: dict[str, Any]) -> float:
    """Return the largest difference between the engine's and the service's log-probabilities of a sample."""
    whole = np.array(PROMPT + tokens(answer))
    datum = Datum(
        whole[:-1].astype(np.int32), {"target_tokens": whole[1:], "weights": np.zeros(len(whole) - 1, np.float32)}
    )
    adapter = adapter or backbone.adapter(LoraConfig(rank=8))  # a new one changes nothing
    ((scores, _),) = backbone.score([Pass(adapter, [datum], "cross_entropy", {}, backward=False)])
    return float(np.abs(scores[0][len(PROMPT) - 1 :] - logprobs(answer)).max())


def sample(engine: Server, name: str | None, count: int = 16, seed: int = 5) -> dict[str, Any]:
    return generate(engine.url, PROMPT, count, model=name, temperature=1.0, seed=seed)


async def test_mixed_requests_have_their_own_adapters_logprobs(
    engine: Server, backbone: Backbone, adapters: Path
) -> None:
    one, other, new = (random_adapter(backbone, seed, rank) for seed, rank in ((1, 8), (2, 16), (3, 8)))
    backbone.export(one, adapters / "a:train:0/v1")
    backbone.export(other, adapters / "b:train:0/v1")
    named: dict[str | None, Adapter | None] = {None: None, "a:train:0/v1": one, "b:train:0/v1": other}

    async def check(named: Mapping[str | None, Adapter | None]) -> None:
        names = [*named] * 2
        sent = (asyncio.to_thread(sample, engine, name, 16, seed) for seed, name in enumerate(names))
        for name, answer in zip(names, await asyncio.gather(*sent), strict=True):
            assert difference(backbone, named[name], answer) < 1e-4, name

    await check(named)
    assert difference(backbone, one, sample(engine, "b:train:0/v1")) > 0.1, "an adapter changes the policy"
    backbone.export(new, adapters / "hidden")
    running = [asyncio.create_task(asyncio.to_thread(sample, engine, name, 400)) for name in named]
    while metric(engine.url, RUNNING) < len(named):
        await asyncio.sleep(0.02)
    (adapters / "hidden").rename(adapters / "a:train:0/v2")
    assert difference(backbone, new, await asyncio.to_thread(sample, engine, "a:train:0/v2")) < 1e-4
    for name, answer in zip(named, await asyncio.gather(*running), strict=True):
        assert difference(backbone, named[name], answer) < 1e-4, name
    last = random_adapter(backbone, 4)
    backbone.export(last, adapters / "b:train:0/v2")
    await check({**named, "a:train:0/v2": new, "b:train:0/v2": last})  # the engine has room for three adapters
    assert httpx.get(engine.url + STATUS_PATH, timeout=60, verify=False).status_code == 404  # it is never updated
    assert metric(engine.url, "vllm:num_preemptions_total") == 0


def test_adapters_do_not_share_cached_prefixes(engine: Server, backbone: Backbone, adapters: Path) -> None:
    hits = [metric(engine.url, HITS)]
    for name in ("cached/v1", "cached/v2", "cached/v1"):
        if not (adapters / name).exists():
            backbone.export(random_adapter(backbone, 7), adapters / name)
        sample(engine, name, 1)
        hits.append(metric(engine.url, HITS))
    assert hits[0] == hits[1] == hits[2] < hits[3]


def test_running_requests_keep_a_removed_adapter_and_names_keep_their_version(
    engine: Server, backbone: Backbone, adapters: Path
) -> None:
    first = random_adapter(backbone, 11)
    backbone.export(first, adapters / "kept/v1")
    assert difference(backbone, first, sample(engine, "kept/v1")) < 1e-4
    backbone.export(random_adapter(backbone, 12), adapters / "kept/v1")
    files.remove_tree(adapters / "kept")
    for number in range(4):  # vLLM drops the first one
        backbone.export(random_adapter(backbone, number), adapters / f"others/v{number}")
        sample(engine, f"others/v{number}", 1)
    assert difference(backbone, first, sample(engine, "kept/v1", seed=6)) < 1e-4
    assert engine.status_code() == 200


async def test_unusable_names_are_refused_with_the_reason(
    engine: Server, backbone: Backbone, adapters: Path, tmp_path: Path
) -> None:
    adapter = random_adapter(backbone, 1)
    backbone.export(adapter, tmp_path / "outside")
    backbone.export(random_adapter(backbone, 1, rank=32), adapters / "large")
    (adapters / "link").symlink_to(tmp_path / "outside")
    for name in ("unknown_layer", "incomplete", "no_config"):
        backbone.export(adapter, adapters / name)
    for name, change in (("unknown_layer", (b"layers.1.self_attn.q", b"layers.7.self_attn.q")), ("incomplete", ())):
        file = adapters / name / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes().replace(*change) if change else file.read_bytes()[:-1])
    (adapters / "no_config" / "adapter_config.json").unlink()
    refused = {
        "none": (404, "model = none: there is no such adapter"),
        "no_config": (404, "adapter_config.json is missing"),
        "../outside": (400, "without '..'"),
        str(tmp_path / "outside"): (400, "is no name of an adapter"),
        "link": (400, "symbolic link out of the directory"),
        "large": (400, "LoRA rank 32 is greater than max_lora_rank 16"),
        "unknown_layer": (400, "the engine has no layer for"),
        "incomplete": (404, "adapter_model.safetensors in"),
    }
    bodies: dict[str, dict[str, Any]] = {
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}},
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 1},
    }
    async with httpx.AsyncClient(headers=secret.header(), timeout=60, verify=False) as client:
        cases = [(name, path) for name in refused for path in bodies]
        answers = await asyncio.gather(
            *(client.post(engine.url + path, json={**bodies[path], "model": name}) for name, path in cases)
        )
    for (name, _), answer in zip(cases, answers, strict=True):
        status, words = refused[name]
        assert answer.status_code == status and words in answer.text, (name, answer.text)
    assert difference(backbone, None, sample(engine, None)) < 1e-4


@pytest.fixture(scope="module")
def service(opened: TinkerServer, backbone: Backbone, engine: Server) -> Iterator[Service]:
    engines = EngineSampler([engine.url], backbone.limits)
    service = Service(opened.store, backbone, TrainerSampler(backbone), engines=engines)
    app = application(service, {key: user for user, key in opened.keys.items()})
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened.listener]})
    thread.start()
    yield service
    server.should_exit = True
    thread.join()
    service.close()


@pytest.fixture
def connect(service: Service, opened: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that connects a user."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    clients: list[Any] = []

    def connect(user: str = FIRST_USER) -> Any:
        clients.append(tinker.ServiceClient(base_url=opened.url, api_key=opened.keys[user]))
        return clients[-1]

    yield connect
    for client in clients:
        client.close("success").result()


def datum(tokens: list[int]) -> Any:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(client: Any, model: str, seed: int) -> Any:
    training = client.create_lora_training_client(base_model=model, rank=8, seed=seed).result()
    training.forward_backward([datum([*PROMPT, seed, seed + 1])], "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    return training


def compare(training: Any, sampled: Any) -> None:
    """Compare a sample's and its prompt's log-probabilities with those of the training client."""
    for sequence in sampled.sequences:
        whole = PROMPT + sequence.tokens
        (output,) = training.forward([datum(whole)], "cross_entropy").result().loss_fn_outputs
        logprobs = [*sampled.prompt_logprobs[1:], *sequence.logprobs]
        assert logprobs == pytest.approx(output["logprobs"].tolist(), abs=1e-4)


def test_two_clients_sample_their_own_adapters(connect: Callable[[str], Any], service: Service) -> None:
    prompt, model = tinker.ModelInput.from_ints(PROMPT), service.limits.model
    clients = connect(FIRST_USER), connect("other")
    trainings = [train(client, model, seed) for seed, client in enumerate(clients, 20)]
    params = [
        tinker.SamplingParams(max_tokens=12, seed=3, stop=[]),
        tinker.SamplingParams(max_tokens=12, seed=3, stop=[], temperature=0.6, top_k=20, top_p=0.9),
    ]
    samplings = [training.save_weights_and_get_sampling_client().result() for training in trainings]
    busy = threading.Event()
    service._worker.submit(busy.wait)  # samples do not wait for the model
    sent = [[s.sample(prompt, 2, each, include_prompt_logprobs=True) for each in params] for s in samplings]
    samples = [[future.result(timeout=600) for future in each] for each in sent]
    busy.set()
    for training, sampled in zip(trainings, samples, strict=True):
        for each in sampled:
            compare(training, each)
    # A step changes nothing for sampling clients that exist, and checkpoints of all kinds can be sampled from.
    before = samplings[0].compute_logprobs(prompt).result()
    for kind in ("save_weights_for_sampler", "save_state"):
        path = getattr(trainings[0], kind)("named").result().path
        named = clients[0].create_sampling_client(model_path=path).result()
        assert named.compute_logprobs(prompt).result() == before
    trainings[0].forward_backward([datum([*PROMPT, 30])], "cross_entropy").result()
    trainings[0].optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    assert samplings[0].compute_logprobs(prompt).result() == before
    newer = trainings[0].save_weights_and_get_sampling_client().result()
    assert newer.compute_logprobs(prompt).result() != before
    base = clients[0].create_sampling_client(base_model=model).result()
    assert base.compute_logprobs(prompt).result() != before
    with pytest.raises(tinker.RequestFailedError, match=r"temperature must be in \[0, 2\]"):
        base.sample(prompt, 1, tinker.SamplingParams(temperature=3.0, max_tokens=1)).result()


def test_end_of_a_session_cancels_its_samples_and_removes_its_adapters(
    service: Service, connect: Callable[[], Any], engine: Server
) -> None:
    client = connect()
    training = train(client, service.limits.model, 40)
    sampling = training.save_weights_and_get_sampling_client().result()
    adapters = service.store.adapters / "sampling"
    (session,) = {name.partition(":")[0] for name in service._adapters}
    assert any((adapters / session).iterdir())
    slow = sampling.sample(tinker.ModelInput.from_ints(PROMPT), 1, tinker.SamplingParams(max_tokens=3800, stop=[]))
    wait_until(lambda: metric(engine.url, RUNNING) == 1)
    asyncio.run(service.end_session(session, "ended by the test"))
    wait_until(lambda: metric(engine.url, RUNNING) == 0)
    wait_until(lambda: not (adapters / session).exists())
    with pytest.raises(tinker.TinkerError):
        slow.result(timeout=600)


async def ask(sampler: EngineSampler, adapter: str | None, params: SamplingParams, **options: Any) -> Any:
    options = {"prompt": PROMPT, "count": 1, "scored": 0} | options
    return await asyncio.wrap_future(sampler.start(sampler.sample(adapter, params=params, **options)))


async def test_stops_seeds_and_limits_are_those_of_the_trainers_sampler(
    service: Service, backbone: Backbone, adapters: Path, tmp_path: Path
) -> None:
    sampler = service._engines
    assert sampler is not None
    adapter = random_adapter(backbone, 1)
    adapter.save(tmp_path / "weights", optimizer=False)
    backbone.export(adapter, adapters / "stops")
    exact = TrainerSampler(backbone)
    greedy = SamplingParams(max_tokens=8, temperature=0, stop=[])
    ((_, tokens, _),), _ = exact.sample(tmp_path / "weights", PROMPT, greedy, 1, 0)
    text = exact._tokenizer.decode(tokens[2:4])
    for update in ({}, {"stop": [tokens[3]]}, {"stop": text}, {"stop": [text, "no"]}, {"max_tokens": 3}):
        params = greedy.model_copy(update=update)
        (expected,), scores = exact.sample(tmp_path / "weights", PROMPT, params, 1, 3)
        (sampled,), engine_scores = await ask(sampler, "stops", params, scored=3)
        assert sampled[:2] == expected[:2], update
        assert sampled[2] == pytest.approx(expected[2], abs=1e-4)
        assert engine_scores == pytest.approx(scores, abs=1e-4, nan_ok=True)
    seeded = SamplingParams(max_tokens=8, seed=2**63 + 5, stop=[])
    first, again = [(await ask(sampler, "stops", seeded, count=3))[0] for _ in range(2)]
    assert [each[1] for each in first] == [each[1] for each in again] and first[0][1] != first[1][1]
    (whole,), _ = await ask(sampler, None, SamplingParams(stop=[]), prompt=PROMPT * 20)
    assert whole[0] == "length" and len(whole[1]) == LENGTH - len(PROMPT) * 20
    with pytest.raises(RequestError, match="3800 to sample: the engines' longest sequence has 4096"):
        await ask(sampler, None, SamplingParams(max_tokens=3800), prompt=PROMPT * 2)


async def test_engines_that_are_away_are_named(engine: Server, backbone: Backbone, model: Path) -> None:
    away, params = f"http://127.0.0.1:{free_port()}", SamplingParams(max_tokens=2)
    impatient = EngineSampler([away], backbone.limits, away_s=0.5)
    both = EngineSampler([away, engine.url], backbone.limits)
    hasty = EngineSampler([engine.url], backbone.limits, away_s=0)
    other = EngineSampler([engine.url], replace(backbone.limits, model=str(model)))
    try:
        with pytest.raises(NoEngineError, match=r"no engine has answered for 0 s: http://127.0.0.1"):
            await ask(impatient, None, params)
        assert len((await ask(both, None, params, count=4))[0]) == 4, "another engine answers"
        with pytest.raises(NoEngineError, match="but this service trains"):
            await ask(other, None, params)
        with pytest.raises(NoEngineError, match="PRIMESLURM_ADAPTERS"):
            await ask(hasty, "missing", params)
    finally:
        for each in (impatient, both, hasty, other):
            each.close()


@pytest.mark.campaign
async def test_an_engine_that_is_away_is_waited_for(
    engine_forks: EngineForks, backbone: Backbone, adapters: Path
) -> None:
    port = free_port()
    patient = EngineSampler([f"http://127.0.0.1:{port}"], backbone.limits, away_s=600)
    try:
        waiting = asyncio.create_task(ask(patient, None, SamplingParams(max_tokens=2)))
        late = engine_forks.start(adapter_engine(backbone.limits.model, adapters), {"http": port})
        ((_, tokens, _),), _ = await waiting
        assert 1 <= len(tokens) <= 2
        late.stop()
    finally:
        patient.close()
