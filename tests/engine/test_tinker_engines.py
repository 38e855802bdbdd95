"""The Tinker service with the real client, and samples of a real engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
import uvicorn

from benchmarks.support.ports import free_port
from primeslurm.tinker.backbone import Backbone
from primeslurm.tinker.engine_sampler import EngineError, EngineSampler
from primeslurm.tinker.requests import RequestError, SamplingParams
from primeslurm.tinker.routes import application
from primeslurm.tinker.sampler import TrainerSampler
from primeslurm.tinker.server import TinkerServer, prepare
from primeslurm.tinker.service import Service
from primeslurm.tinker.store import FIRST_USER
from primeslurm.trainer.distributed.world import World
from scripts.models import tiny_model
from tests.support.adapter_engines import adapter_engine, random_adapter
from tests.support.generate import metric
from tests.support.processes import EngineForks, Server
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::FutureWarning")]
RUNNING = "vllm:num_requests_running"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "qwen3"
    tiny_model.write_model(directory, "qwen3")
    return directory


@pytest.fixture(scope="module")
def backbone(source: Path, world: World) -> Backbone:
    return Backbone(str(source), 16, world)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> TinkerServer:
    return prepare("127.0.0.1", 0, tmp_path_factory.mktemp("tinker") / "data", ["other"])


@pytest.fixture(scope="module")
def engine(engine_forks: EngineForks, source: Path, opened: TinkerServer) -> Iterator[Server]:
    server = engine_forks.start(adapter_engine(source, opened.store.adapters, loras=3))
    server.wait("/health")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def sampler(engine: Server, backbone: Backbone) -> Iterator[EngineSampler]:
    sampler = EngineSampler([engine.url], backbone.limits, away_s=60)
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def service(opened: TinkerServer, backbone: Backbone, engine: Server) -> Iterator[Service]:
    service = Service(
        opened.store, backbone, TrainerSampler(backbone), engines=EngineSampler([engine.url], backbone.limits, 60)
    )
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


def check(training: Any, sampled: Any) -> None:
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
    sent = [
        (training, sampling.sample(prompt, 2, each, include_prompt_logprobs=True))
        for training, sampling in zip(trainings, samplings, strict=True)
        for each in params
    ]
    for training, future in sent:
        check(training, future.result())
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


def test_samples_do_not_wait_for_the_model(connect: Callable[[], Any], service: Service) -> None:
    sampling = connect().create_sampling_client(base_model=service.limits.model).result()
    params, busy = tinker.SamplingParams(max_tokens=4), threading.Event()
    service._worker.submit(busy.wait, 60)
    try:
        assert sampling.sample(tinker.ModelInput.from_ints(PROMPT), 1, params).result(timeout=30)
    finally:
        busy.set()


def test_end_of_a_session_cancels_its_samples_and_removes_its_adapters(
    service: Service, connect: Callable[[], Any], engine: Server
) -> None:
    client = connect()
    training = train(client, service.limits.model, 40)
    sampling = training.save_weights_and_get_sampling_client().result()
    adapters = service.store.adapters / "sampling"
    (session,) = {name.partition(":")[0] for name in service._adapters}
    assert any((adapters / session).iterdir())
    slow = sampling.sample(tinker.ModelInput.from_ints(PROMPT), 1, tinker.SamplingParams(max_tokens=480, stop=[]))
    wait_until(lambda: metric(engine.url, RUNNING) == 1)
    asyncio.run(service.end_session(session, "ended by the test"))
    wait_until(lambda: metric(engine.url, RUNNING) == 0)
    wait_until(lambda: not (adapters / session).exists())
    with pytest.raises(tinker.TinkerError):
        slow.result(timeout=30)


async def ask(sampler: EngineSampler, adapter: str | None, params: SamplingParams, **options: Any) -> Any:
    options = {"prompt": PROMPT, "count": 1, "scored": 0} | options
    return await asyncio.wrap_future(sampler.start(sampler.sample(adapter, params=params, **options)))


async def test_stops_seeds_and_limits_are_those_of_the_trainers_sampler(
    sampler: EngineSampler, backbone: Backbone, opened: TinkerServer, tmp_path: Path
) -> None:
    adapter = random_adapter(backbone, 1)
    adapter.save(tmp_path / "weights", optimizer=False)
    backbone.export(adapter, opened.store.adapters / "stops")
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
    first, _ = await ask(sampler, "stops", seeded, count=3)
    again, _ = await ask(sampler, "stops", seeded, count=3)
    assert [each[1] for each in first] == [each[1] for each in again] and first[0][1] != first[1][1]
    (whole,), _ = await ask(sampler, None, SamplingParams(stop=[]), prompt=PROMPT * 62)
    assert whole[0] == "length" and len(whole[1]) == 512 - len(PROMPT) * 62
    with pytest.raises(RequestError, match="500 to sample: the engines' longest sequence has 512"):
        await ask(sampler, None, SamplingParams(max_tokens=500), prompt=PROMPT * 2)


async def test_engines_that_are_away_are_waited_for_and_then_named(
    engine_forks: EngineForks, engine: Server, backbone: Backbone, opened: TinkerServer, model: Path
) -> None:
    port, params = free_port(), SamplingParams(max_tokens=2)
    impatient = EngineSampler([f"http://127.0.0.1:{port}"], backbone.limits, away_s=0.5)
    patient = EngineSampler([f"http://127.0.0.1:{port}"], backbone.limits, away_s=300)
    both = EngineSampler([f"http://127.0.0.1:{port}", engine.url], backbone.limits, away_s=60)
    hasty = EngineSampler([engine.url], backbone.limits, away_s=0)
    other = EngineSampler([engine.url], replace(backbone.limits, model=str(model)))
    try:
        waiting = asyncio.create_task(ask(patient, None, params))
        with pytest.raises(EngineError, match=r"no engine has answered for 0 s: http://127.0.0.1"):
            await ask(impatient, None, params)
        assert len((await ask(both, None, params, count=4))[0]) == 4, "another engine answers"
        with pytest.raises(EngineError, match="but this service trains"):
            await ask(other, None, params)
        with pytest.raises(EngineError, match="PRIMESLURM_ADAPTERS"):
            await ask(hasty, "missing", params)
        late = engine_forks.start(adapter_engine(Path(backbone.limits.model), opened.store.adapters), {"http": port})
        ((_, tokens, _),), _ = await waiting
        assert 1 <= len(tokens) <= 2
        late.stop()
    finally:
        for each in (impatient, patient, both, hasty, other):
            each.close()
