"""Adapters by name on a CPU engine: `python -m benchmarks named_adapters MODEL [--write]`.

Prints how far log-probabilities of mixed requests are from the service's, bytes and seconds from saving a version to
its first token beside the merged path, and tokens per second of the Tinker service's samples with and without engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.machine import machine, versions

# Tokens of a sample whose speed is measured
LENGTH = 24
RESULT = Path(__file__).resolve().parent / "results" / "named_adapters.json"


def _recipe(model: Path, **fields: Any) -> Any:
    from primeslurm.recipe import Recipe

    common = {"name": "named-adapters", "seq_len": 1024, "model": {"path": str(model), "dtype": "float32"}}
    return Recipe.model_validate({**common, "inference": {"kv_cache_bytes": 2**28}, **fields})


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def measure(model: Path, scratch: Path, rank: int, rounds: int) -> dict[str, Any]:
    import httpx
    import numpy as np
    import torch

    from benchmarks.support.servers import start_process
    from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
    from primeslurm.plan.commands.engine import Engines
    from primeslurm.tinker.backbone import Adapter, Backbone, Pass
    from primeslurm.tinker.engine_sampler import EngineSampler
    from primeslurm.tinker.requests import Datum, LoraConfig, SamplingParams
    from primeslurm.tinker.sampler import TrainerSampler
    from primeslurm.trainer.assembly.build import build
    from primeslurm.trainer.components import lora
    from primeslurm.trainer.distributed.world import alone
    from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
    from primeslurm.trainer.weights.export import Encoding
    from primeslurm.wire.names import ADAPTERS
    from primeslurm.wire.transport import secret

    torch.set_num_threads(1)
    world = alone()
    backbone = Backbone(str(model), rank, world)
    prompt = [int(token) for token in np.random.default_rng(0).integers(100, backbone.limits.vocabulary, 64)]
    sampling = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}

    def adapter(seed: int) -> Adapter:
        made = backbone.adapter(LoraConfig(rank=rank, seed=seed))
        with torch.no_grad():
            for name, parameter in made.parameters.items():
                if name.endswith(lora.B):
                    parameter.normal_(std=0.02)
        return made

    def first_token(url: str, name: str | None) -> None:
        body = {"model": name, "token_ids": prompt, "sampling_params": sampling}
        httpx.post(f"{url}/inference/v1/generate", json=body, headers=secret.header(), timeout=600).raise_for_status()

    # By name
    command = Engines(_recipe(model, task="serve"), "cpu", "engine", sys.executable).command()
    options = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", str(rank))
    env = command.env | {ADAPTERS: str(scratch / "adapters")}
    engine = start_process(command._replace(argv=(*command.argv, *options), env=env), {}, scratch / "by_name.log")
    sampler = None
    try:
        engine.wait("/health")
        first_token(engine.url, None)
        seconds = []
        for version in range(rounds):
            made = adapter(100 + version)
            began = time.perf_counter()
            backbone.export(made, scratch / "adapters" / f"timed/v{version}")
            first_token(engine.url, f"timed/v{version}")
            seconds.append(time.perf_counter() - began)
        by_name = {"bytes": _bytes(scratch / "adapters" / "timed" / "v0"), "save_to_first_token_s": median(seconds)}

        sampler = EngineSampler([engine.url], backbone.limits)
        named: dict[str | None, Adapter | None] = {None: None, "a/v1": adapter(1), "b/v1": adapter(2)}
        for name, made in named.items():
            if name and made:
                backbone.export(made, scratch / "adapters" / name)
        params = SamplingParams(max_tokens=16, stop=[], seed=0)

        async def all_at_once(names: list[str | None], params: SamplingParams) -> list[Any]:
            assert sampler is not None
            sent = [sampler.start(sampler.sample(name, prompt, params, 2, 0)) for name in names]
            return [await asyncio.wrap_future(each) for each in sent]

        worst = 0.0
        names = [*named] * 2
        for name, (sequences, _) in zip(names, asyncio.run(all_at_once(names, params)), strict=True):
            for _, tokens, logprobs in sequences:
                whole = np.array(prompt + tokens)
                inputs = {"target_tokens": whole[1:], "weights": np.zeros(len(whole) - 1, np.float32)}
                datum = Datum(whole[:-1].astype(np.int32), inputs)
                made = named[name] or backbone.adapter(LoraConfig(rank=rank))
                ((scores, _),) = backbone.score([Pass(made, [datum], "cross_entropy", {}, backward=False)])
                worst = max(worst, float(np.abs(scores[0][len(prompt) - 1 :] - logprobs).max()))

        greedy = SamplingParams(max_tokens=LENGTH, stop=[], temperature=0)
        made = named["a/v1"]
        assert made is not None
        made.save(scratch / "weights", optimizer=False)
        began = time.perf_counter()
        sequences, _ = TrainerSampler(backbone).sample(scratch / "weights", prompt, greedy, 2, 0)
        without = 2 * LENGTH / (time.perf_counter() - began)
        began = time.perf_counter()
        answers = asyncio.run(all_at_once(["a/v1", "b/v1"], greedy))
        rate = 4 * LENGTH / (time.perf_counter() - began)
        same = answers[0][0][0][1] == sequences[0][1]
    finally:
        if sampler:
            sampler.close()
        engine.stop()

    # Merged: the whole model at each version
    trained = {"lora": {"rank": rank, "alpha": 32.0, "engines": "merged"}}
    rl = _recipe(
        model, max_steps=1, environments=[{"id": "reverse-text"}], trainer=trained, weights={"transport": "filesystem"}
    )
    policy = build(rl, world)
    engine = start_process(Engines(rl, "cpu", "engine", sys.executable).command(), {}, scratch / "merged.log")
    try:
        engine.wait("/primeslurm/status")
        publisher = Publisher(policy, scratch / "run", Encoding(torch.float32), 9, world)

        async def merged() -> list[float]:
            client = EngineClient(lambda: engine.url, str(model), status_timeout_s=60)
            await client.apply(PolicyVersion(0, str(model)), 600)
            seconds = []
            for version in range(1, rounds + 1):
                began = time.perf_counter()
                await client.apply(PolicyVersion(version, str(publisher.publish(version))), 600)
                await asyncio.to_thread(first_token, engine.url, None)
                seconds.append(time.perf_counter() - began)
            return seconds

        seconds = asyncio.run(merged())
        whole_model = {"bytes": _bytes(scratch / "run/weights/v000001"), "save_to_first_token_s": median(seconds)}
    finally:
        engine.stop()
    return {
        "mixed_requests": {"adapters": 2, "base_model": True, "largest_logprob_difference": worst},
        "new_version": {"by_name": by_name, "merged": whole_model},
        "samples_tokens_per_s": {"trainers_model": without, "engine": rate},
        "greedy_samples_equal": same,
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks named_adapters", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write named_adapters.json")
    options = parser.parse_args(words)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure(options.model.resolve(), Path(scratch), options.rank, options.rounds)
    result = {
        "command": " ".join(["python -m benchmarks named_adapters", *words]),
        "machine": machine(),
        "versions": versions("torch", "vllm"),
        "rank": options.rank,
        **measured,
    }
    print(json.dumps(result, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
