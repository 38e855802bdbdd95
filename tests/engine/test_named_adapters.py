"""Adapters by name on a real engine: own log-probabilities, new versions meanwhile, and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from primeslurm.base import files
from primeslurm.tinker.backbone import Adapter, Backbone, Pass
from primeslurm.tinker.requests import Datum, LoraConfig
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.names import STATUS_PATH
from primeslurm.wire.transport import secret
from scripts.models import tiny_model
from tests.support.adapter_engines import adapter_engine, random_adapter
from tests.support.generate import generate, logprobs, metric, tokens
from tests.support.processes import EngineForks, Server

pytestmark = pytest.mark.engine
PROMPT = [*range(5, 105)] * 2  # longer than a block of the prefix cache


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "qwen3"
    tiny_model.write_model(directory, "qwen3")
    return directory


@pytest.fixture(scope="module")
def backbone(source: Path, world: World) -> Backbone:
    return Backbone(str(source), 32, world)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def engine(engine_forks: EngineForks, source: Path, adapters: Path) -> Iterator[Server]:
    server = engine_forks.start(adapter_engine(source, adapters, loras=3, seq_len=4096))
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


class Running:
    """A long request, and what has arrived of its answer."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.answer: dict[str, Any] = {"choices": [{"token_ids": [], "logprobs": {"content": []}}]}

    async def run(self, engine: Server) -> None:
        sampling = {"max_tokens": 3800, "temperature": 1.0, "seed": 7, "logprobs": 0, "ignore_eos": True}
        body = {"model": self.name, "token_ids": PROMPT, "sampling_params": sampling, "stream": True}
        async with httpx.AsyncClient(headers=secret.header(), timeout=300, verify=False) as client:
            async with client.stream("POST", f"{engine.url}/inference/v1/generate", json=body) as chunks:
                async for line in chunks.aiter_lines():
                    if line.startswith("data: {"):
                        choice, new = self.answer["choices"][0], json.loads(line[6:])["choices"][0]
                        choice["token_ids"] += new["token_ids"]
                        choice["logprobs"]["content"] += new["logprobs"]["content"]


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

    async def received(running: list[Running], count: int) -> None:
        while any(len(tokens(each.answer)) < count for each in running):
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.02)

    await check(named)
    assert difference(backbone, one, sample(engine, "b:train:0/v1")) > 0.1, "an adapter changes the policy"
    backbone.export(new, adapters / "hidden")
    running = [Running(name) for name in named]
    tasks = [asyncio.create_task(each.run(engine)) for each in running]
    await received(running, 5)
    (adapters / "hidden").rename(adapters / "a:train:0/v2")
    answer = await asyncio.to_thread(sample, engine, "a:train:0/v2")
    await received(running, max(len(tokens(each.answer)) for each in running) + 5)
    for each, task in zip(running, tasks, strict=True):
        task.cancel()
        assert difference(backbone, named[each.name], each.answer) < 1e-4, each.name
    assert difference(backbone, new, answer) < 1e-4
    last = random_adapter(backbone, 4)
    backbone.export(last, adapters / "b:train:0/v2")
    await check({**named, "a:train:0/v2": new, "b:train:0/v2": last})  # the engine has room for three adapters
    assert httpx.get(engine.url + STATUS_PATH, timeout=60, verify=False).status_code == 404  # it is never updated
    assert metric(engine.url, "vllm:num_preemptions_total") == 0


def test_adapters_do_not_share_cached_prefixes(engine: Server, backbone: Backbone, adapters: Path) -> None:
    def hits() -> float:
        return metric(engine.url, "vllm:prefix_cache_hits_total")

    for name in ("cached/v1", "cached/v2"):
        backbone.export(random_adapter(backbone, 7), adapters / name)
    before = hits()
    sample(engine, "cached/v1", 1)
    sample(engine, "cached/v2", 1)
    assert hits() == before
    sample(engine, "cached/v1", 1)
    assert hits() > before


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
    (adapters / "link").symlink_to(tmp_path / "outside")
    backbone.export(random_adapter(backbone, 1, rank=32), adapters / "large")
    for name in ("unknown_layer", "incomplete", "no_config"):
        backbone.export(adapter, adapters / name)
    tensors = adapters / "unknown_layer" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes().replace(b"layers.1.self_attn.q", b"layers.7.self_attn.q"))
    tensors = adapters / "incomplete" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    (adapters / "no_config" / "adapter_config.json").unlink()
    refused = {
        "none": (404, "model = none: there is no such adapter"),
        "no_config": (404, "adapter_config.json is missing"),
        "../outside": (400, "without '..'"),
        str(tmp_path / "outside"): (400, "is no name of an adapter"),
        "link": (400, "symbolic link out of the directory"),
        "large": (400, "LoRA rank 32 is greater than max_lora_rank 16"),
        "unknown_layer": (400, "the engine has no layer for"),
        "incomplete": (400, "adapter_model.safetensors in"),
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
