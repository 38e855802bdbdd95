"""Decoding throughput, accepted drafts and log-probabilities of engines with speculative decoding.

    timeout 300 python -m benchmarks speculation OUT.json
    python -m benchmarks speculation OUT.json smollm2-ngram-3 smollm2 --batches 1 8 --sampled 48 --cell-s 600
    python -m benchmarks speculation OUT.json glm4_5_air-mtp-1 glm4_5_air --batches 1 8 --sampled 48 --cell-s 600

The first command is for one GPU, the others for CPUs. A cell is one engine: a model, and how it drafts. SmolLM2-135M is
in `--smollm2`, where `primeslurm install --model smollm2` writes it. It continues source code (`continue`), or writes
it a second time (`repeat`). The other models have few layers and experts, on GPUs the width of the released ones, and
random weights. They and SmolLM2's random EAGLE head show what drafting costs and that it is exact, but no gain, because
hardly any of their drafts is accepted. A model's cell without drafts comes last. Its engine computes the samples of the
others, too: `logprob_difference` is the largest and the mean difference in log-probability, and `equal_rows` the
fraction of tokens with the same routed experts. Its own samples show how much of that is rounding. GPU engines start at
the same time, and are measured in turn. A cell that exceeds its time says so. OUT.CELL.log has its engine's output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.support.draft_layers import write_checkpoint, write_eagle
from benchmarks.support.machine import machine, versions
from benchmarks.support.servers import Server, start_engine
from primeslurm.orchestrator.telemetry.engine_load import parse
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import (
    GENERATE,
    ROUTED_FROM,
    Completion,
    GenerateEndpoint,
)
from primeslurm.plan.commands.command import Device
from primeslurm.plan.commands.engine import Engines
from primeslurm.recipe import Recipe
from primeslurm.wire.batches import routed_experts
from primeslurm.wire.transport import secret

ROOT = Path(__file__).resolve().parents[1]
PROMPT = 256  # tokens per prompt, at most
LAYERS, EXPERTS, VOCABULARY = 2, 16, 32768  # of the random models
SCORED = 8  # requests whose log-probabilities are compared
NGRAMS = {
    "ngram-3": {"num_tokens": 3},
    "ngram-3-short": {"num_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "ngram-8": {"num_tokens": 8, "prompt_lookup_min": 3, "prompt_lookup_max": 8},
}
MTP = {f"mtp-{count}": {"method": "mtp", "num_tokens": count} for count in (1, 3)}
DRAFTERS: dict[str, dict[str, dict[str, Any]]] = {
    "smollm2": {
        **{name: {"method": "ngram", **setting} for name, setting in NGRAMS.items()},
        "eagle-3": {"method": "eagle", "num_tokens": 3},
    },
    **dict.fromkeys(("glm4_5_air", "deepseek_v3", "glm5"), MTP),
}
CELLS = [cell for model, settings in DRAFTERS.items() for cell in (*(f"{model}-{name}" for name in settings), model)]
# Sizes on CPUs. vLLM's latent attention on CPUs needs DeepSeek's own dimensions of heads.
_TINY = {"vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32, "initializer_range": 0.2}
TINY: dict[str, dict[str, Any]] = {
    "glm4_5_air": _TINY | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "deepseek_v3": _TINY | {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24},
    "glm5": _TINY | {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24},
}
# Values of the released configs that transformers does not write by default.
RELEASED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}


@dataclass
class Cell:
    """An engine of the benchmark, and what it has sampled."""

    name: str
    recipe: Recipe
    prompts: dict[str, list[list[int]]]
    """Prompts by kind, as many as the largest batch has."""
    server: Server | None = None
    samples: list[tuple[list[int], Completion]] = field(default_factory=list)
    """Prompts and answers, for the engine without drafts to score."""


def recipe(name: str, model: Path, drafts: Path, device: Device, eager: bool, batch: int, sampled: int) -> Recipe:
    """Return the recipe of a cell's engine. `drafts` is the draft model, for EAGLE."""
    family, _, drafter = name.partition("-")
    speculative = DRAFTERS[family].get(drafter)
    if drafter.startswith("eagle"):
        speculative = {**DRAFTERS[family][drafter], "model": str(drafts)}
    inference: dict[str, Any] = {"max_num_seqs": batch, "speculative": speculative}
    if device == "cpu":
        inference |= {"kv_cache_bytes": 2**29}
    else:
        # Little memory, because the engines share a GPU. Compilation would take most of a cell's time.
        inference |= {"kv_cache_bytes": 2**32, "gpu_memory_utilization": 0.05, "enforce_eager": eager}
        graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
        inference |= {} if eager else {"vllm_extra": graphs}
    sections = {
        "seq_len": 2 * PROMPT + sampled,
        "model": {"path": str(model), "dtype": "float32" if device == "cpu" else "bfloat16"},
        "environments": [{"id": "reverse-text"}],
        "trainer": {"router_replay": family != "smollm2"},
        "weights": {"transport": "filesystem"},
    }
    return Recipe.model_validate({"name": "speculation", "max_steps": 1, "inference": inference, **sections})


def write_random(family: str, directory: Path, device: Device) -> Path:
    """Write a random model with a draft layer."""
    import torch

    from benchmarks.training_models import SHAPES

    sizes, experts = (TINY[family], 4) if device == "cpu" else ({"vocab_size": VOCABULARY}, EXPERTS)

    def build(layers: int) -> Any:
        config = SHAPES[family].build(layers, experts, None)
        few = {"num_experts_per_tok": min(config.num_experts_per_tok, experts // 2), "n_group": 1, "topk_group": 1}
        return type(config).from_dict(config.to_dict() | RELEASED | few | sizes)

    write_checkpoint(directory, build, LAYERS, "float32" if device == "cpu" else "bfloat16", device)
    torch.cuda.empty_cache()
    return directory


def code_prompts(model: Path, count: int) -> dict[str, list[list[int]]]:
    """Return prompts to continue source code, and to repeat it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "".join(path.read_text() for path in sorted((ROOT / "primeslurm" / "plan").rglob("*.py")))
    ids = tokenizer(text[: 4 * PROMPT * (count + 1) * 2]).input_ids
    chunks = [ids[at * PROMPT :][:PROMPT] for at in range(count)]
    again = tokenizer("\n\n# The same code again:\n").input_ids
    half = PROMPT // 2
    return {"continue": chunks, "repeat": [[*chunk[:half], *again, *chunk[:16]] for chunk in chunks]}


def random_prompts(model: Path, count: int) -> dict[str, list[list[int]]]:
    """Return prompts of random tokens."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    return {"random": [[draw.randrange(3, vocabulary) for _ in range(PROMPT)] for _ in range(count)]}


async def measure(cell: Cell, batches: Iterable[int], sampled: int) -> dict[str, Any]:
    """Sample from a cell's engine, and return the results by kind of prompt and batch size."""
    server = cell.server
    assert server is not None
    client = EngineClient(lambda: server.url, cell.recipe.model.path)
    await client.apply(PolicyVersion(0, cell.recipe.model.path), 600)
    await client.close()
    replay = cell.recipe.trainer.router_replay
    endpoint = GenerateEndpoint(lambda: server.url, cell.recipe.max_len, 600, routed=replay)

    async def sample(prompts: list[list[int]], tokens: int, salt: str) -> list[Completion]:
        settings = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        settings |= {ROUTED_FROM: 0} if replay else {}
        # Another salt for each batch, so that no batch finds its prompts in the cache.
        bodies = [{"token_ids": ids, "cache_salt": salt, "sampling_params": settings} for ids in prompts]
        return await asyncio.gather(*(endpoint.generate(body, {}) for body in bodies))

    results: dict[str, Any] = {}
    for kind, prompts in cell.prompts.items():
        for batch in batches:
            await sample(prompts[:batch], 8, f"warm-{kind}-{batch}")  # compiles kernels
            before, begun = load_of(server), time.monotonic()
            answers = await sample(prompts[:batch], sampled, f"{kind}-{batch}")
            seconds, after = time.monotonic() - begun, load_of(server)
            drafted = after.get("drafted", 0) - before.get("drafted", 0)
            accepted = after.get("accepted", 0) - before.get("accepted", 0)
            results.setdefault(kind, {})[str(batch)] = {
                "sampled_tokens_per_s": round(batch * sampled / seconds, 1),
                **({"drafted": drafted, "acceptance_rate": round(accepted / drafted, 4)} if drafted else {}),
            }
        cell.samples += list(zip(prompts, answers, strict=False))[:SCORED]
    await endpoint.close()
    return results


def load_of(server: Server) -> dict[str, float]:
    return parse(httpx.get(f"{server.url}/metrics", timeout=60).text)


def score(server: Server, samples: list[tuple[list[int], Completion]]) -> dict[str, Any]:
    """Compute the samples of a cell on an engine without drafts, and return the differences."""
    differences, equal = list[float](), list[bool]()
    for prompt, answer in samples:
        ids = prompt + answer.token_ids
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        response = httpx.post(
            server.url + GENERATE,
            json={"token_ids": ids, "cache_salt": "score", "sampling_params": settings},
            headers=secret.header(),
            timeout=120,
        )
        response.raise_for_status()
        content = response.json()
        entries = content["prompt_logprobs"][len(prompt) :]
        there = [entry[str(token)]["logprob"] for entry, token in zip(entries, answer.token_ids, strict=True)]
        differences += [abs(a - b) for a, b in zip(there, answer.logprobs, strict=True)]
        if answer.routed_experts is not None:
            rows = routed_experts.from_npy(content["choices"][0]["routed_experts"].encode(), len(ids))
            pairs = (np.sort(each[: len(ids) - 1], -1) for each in (rows, answer.routed_experts))
            equal += np.equal(*pairs).all((1, 2)).tolist()
    result: dict[str, Any] = {"logprob_difference": [max(differences), statistics.mean(differences)]}
    return result | ({"equal_rows": round(statistics.mean(equal), 5)} if equal else {})


def start(cell: Cell, device: Device, out: Path) -> Server:
    """Start the engine of a cell without waiting for it."""
    log = out.with_suffix(f".{cell.name}.log")
    log.unlink(missing_ok=True)
    return start_engine(Engines(cell.recipe, device, "engine", sys.executable).command(), log)


def run(group: list[Cell], device: Device, out: Path, options: argparse.Namespace, report: Callable[..., None]) -> None:
    """Measure the cells of a model in turn. The last one scores the others' samples."""
    for cell in group:
        try:
            cell.server = cell.server or start(cell, device, out)
            waited = cell.server.wait("/primeslurm/status", options.cell_s)
            measured = asyncio.wait_for(measure(cell, options.batches, options.sampled), options.cell_s)
            report(cell.name, {"waited_seconds": round(waited, 1), **asyncio.run(measured)})
            if "-" not in cell.name:
                for other in group:
                    if other.samples:
                        report(other.name, score(cell.server, other.samples))
        except Exception as error:  # the other cells still run
            report(cell.name, {"failed": f"{type(error).__name__}: {str(error)[-1500:]}"})
        finally:
            if cell.server is not None:
                cell.server.stop()


def main(words: list[str]) -> None:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks speculation", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)}; without: all but glm5's")
    parser.add_argument("--smollm2", type=Path, default=Path(".primeslurm/smollm2/model"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--sampled", type=int, default=128, help="tokens of each request")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--cell-s", type=float, default=110.0, help="seconds to start an engine, and to measure it")
    options = parser.parse_args(words)
    names = options.cells or [cell for cell in CELLS if not cell.startswith("glm5")]
    if unknown := set(names) - set(CELLS):
        parser.error(f"no cell is named {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    if "smollm2" in {name.partition("-")[0] for name in names} and not options.smollm2.is_dir():
        parser.error(f"--smollm2 {options.smollm2}: no such directory; run `primeslurm install --model smollm2`")
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks speculation", *words]),
        "machine": machine(),
        "versions": versions("torch", "vllm"),
        "tokens": {"prompt": PROMPT, "sampled": options.sampled},
        "cells": {name: {} for name in names},
    }

    def report(name: str, values: dict[str, Any]) -> None:
        result["cells"][name] |= values
        print(name, json.dumps(values), flush=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")

    groups: list[list[Cell]] = []
    with tempfile.TemporaryDirectory() as directory:
        drafts = Path(directory) / "drafts"
        try:
            for family in DRAFTERS:
                members = [name for name in CELLS if name in names and name.partition("-")[0] == family]
                if not members:
                    continue
                small = family == "smollm2"
                model = options.smollm2 if small else write_random(family, Path(directory) / family, device)
                prompts = (code_prompts if small else random_prompts)(model, max(options.batches))
                if small:
                    write_eagle(drafts, model)
                values = (drafts, device, options.eager, max(options.batches), options.sampled)
                groups.append([Cell(name, recipe(name, model.resolve(), *values), prompts) for name in members])
                for cell in groups[-1] if device == "cuda" else ():
                    cell.server = start(cell, device, options.out)
            for group in groups:
                run(group, device, options.out, options, report)
        finally:
            for cell in (cell for group in groups for cell in group if cell.server is not None):
                cell.server.stop()
