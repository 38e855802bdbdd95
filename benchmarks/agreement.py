"""Differences between the log-probabilities of trainer and engine, and which part of the model causes them.

Engines sample answers at temperature 1 and return log-probabilities. The trainer computes those of the same tokens from
the same bfloat16 weights, in variants that each change one part. A float32 forward pass of transformers is the
reference: it shows whether the engine or the trainer is farther from exact results.

The model is SmolLM2-135M-Instruct with sums as prompts (`primeslurm install --model smollm2` makes it), or, with
--family, a few random layers of a released model's width. Every engine and variant has its own time limit, and results
are written after each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np

from benchmarks.router_replay import document
from benchmarks.support.machine import machine, versions
from benchmarks.support.ports import free_port
from benchmarks.support.servers import Server, rank_environment, start_engine
from primeslurm.orchestrator.batching.packing import Common, Document, RowLengths, encode, pack
from primeslurm.orchestrator.environments.arithmetic import PROMPT, ArithmeticConfig, pairs
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import Completion, GenerateEndpoint
from primeslurm.plan.commands.command import Device
from primeslurm.plan.commands.engine import ALONE, Engines
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.batch import Batch, BatchInfo, Row
from primeslurm.wire.batches.frames import assembled

RESULT = Path(__file__).resolve().parent / "results" / "agreement.json"
SEQ_LEN = 256
WARM_UP = 8
# Time limits of an engine and of a variant [s]
ENGINE_S = {"cpu": 1800, "cuda": 120}
VARIANT_S = {"cpu": 900, "cuda": 90}
ENGINES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32_head": {"model": {"head_dtype": "float32"}},
    "float32_head_batch_invariant": {"model": {"head_dtype": "float32"}, "inference": {"batch_invariant": True}},
    "float32": {"model": {"dtype": "float32"}},
}
DEFAULT = {"cpu": ("bfloat16", "float32_head", "float32"), "cuda": tuple(ENGINES)}


@dataclass(frozen=True)
class Case:
    """A model, prompts for it, and how to sample."""

    model: Path
    device: Device
    replay: bool
    """Whether the model has experts whose choice can be replayed."""
    prompts: Sequence[Sequence[int]]
    sampling: Mapping[str, Any]

    def recipe(self, changes: Mapping[str, Mapping[str, Any]]) -> Recipe:
        """Return the recipe of a run. `changes` are fields by section."""
        sections: dict[str, dict[str, Any]] = {
            "model": {"path": str(self.model)},
            "trainer": {"router_replay": self.replay, "compile": False, "memory": {"lm_head_chunk": 2048}},
            # With the size of the KV cache given, engines that share a GPU do not measure its free memory.
            "inference": {"kv_cache_bytes": 2**29 if self.device == "cpu" else 2**32, "enforce_eager": True},
        }
        if self.device == "cuda":
            sections["inference"]["gpu_memory_utilization"] = 0.2
        for section, fields in changes.items():
            sections[section] |= fields
        common = {"name": "agreement", "max_steps": 1, "seq_len": SEQ_LEN, "environments": [{"id": "arithmetic"}]}
        return Recipe.model_validate(common | sections)


@dataclass
class Report:
    """The results, which are written after each measurement."""

    out: Path
    write: bool
    words: list[str]
    model: str
    engines: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def add(self, results: dict[str, Any], name: str, value: dict[str, Any]) -> None:
        """Set a value of `engines` or of a mapping in it, and write all."""
        results[name] = value
        report = {
            "command": " ".join(["python -m benchmarks agreement OUT.json", *self.words]),
            "date": str(date.today()),
            "machine": machine(),
            "versions": versions("torch", "vllm", "transformers"),
            "model": self.model,
            "seconds": round(time.monotonic() - self.began),
            "engines": self.engines,
        }
        for path in (self.out, RESULT) if self.write else (self.out,):
            path.write_text(json.dumps(report, indent=2) + "\n")


def main(words: list[str]) -> None:
    options = parsed(words)
    import torch

    from benchmarks.trainer_variants import VARIANTS

    if unknown := set(options.variants) - VARIANTS.keys():
        sys.exit(f"error: --variants {' '.join(sorted(unknown))}: choose from {', '.join(VARIANTS)}")
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as made:
        case = family_case(options, device, Path(made)) if options.family else arithmetic_case(options, device)
        report = Report(
            options.out,
            options.write,
            [word for word in words if word != str(options.out)],
            options.family or "SmolLM2-135M-Instruct",
        )
        names = options.engines or DEFAULT[device]
        at_once = 1 if device == "cpu" or options.family else len(names)  # a small model leaves room on a GPU
        documents: dict[str, list[Document]] = {}
        for first in range(0, len(names), at_once):
            documents |= sample(case, names[first : first + at_once], report)
        compare(case, documents, options.variants, report)
    print(options.out.read_text(), end="")


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks agreement", description=__doc__)
    parser.add_argument("out", type=Path, help="file of the results; logs of engines are written beside it")
    parser.add_argument("--write", action="store_true", help=f"also write {RESULT.name}")
    parser.add_argument("--model", type=Path, default=Path(".primeslurm/smollm2/model"), help="directory of SmolLM2")
    parser.add_argument("--family", help="model type of a random model instead, for example qwen3_moe")
    parser.add_argument("--layers", type=int, default=2, help="layers of a random model")
    parser.add_argument("--experts", type=int, help="experts of a random layer; default: as released, 8 on CPUs")
    parser.add_argument("--rollouts", type=int, help="answers per engine; default: 512 on a GPU, 96 on CPUs")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default: all that run here")
    parser.add_argument("--variants", nargs="+", default=(), help="variants of the trainer; default: all")
    return parser.parse_args(words)


def arithmetic_case(options: argparse.Namespace, device: Device) -> Case:
    """Return SmolLM2 with the prompts of the environment `arithmetic`."""
    from transformers import AutoTokenizer

    if not (options.model / "config.json").exists():
        sys.exit(f"error: --model {options.model}: there is no model; make it with primeslurm install --model smollm2")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    count = (options.rollouts or (96 if device == "cpu" else 512)) + WARM_UP
    messages = [[{"role": "user", "content": PROMPT.format(a=a, b=b)}] for a, b in pairs(ArithmeticConfig())[:count]]
    prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    sampling = {"max_tokens": 32, "temperature": 1.0, "stop_token_ids": [tokenizer.eos_token_id]}
    return Case(options.model, device, False, prompts, sampling)


def family_case(options: argparse.Namespace, device: Device, directory: Path) -> Case:
    """Write a random model of released width, and return it with random prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.training_models import SHAPES
    from primeslurm.models.registry import model_types

    shapes = {cast(Any, shape.config).model_type: shape for shape in reversed(SHAPES.values())}
    if options.family not in shapes:
        sys.exit(f"error: --family {options.family}: no shape is known; choose one of {', '.join(sorted(shapes))}")
    small, shape = device == "cpu", shapes[options.family]
    experts = (options.experts or (8 if small else None)) if hasattr(shape.config(), "num_experts_per_tok") else None
    config = shape.build(options.layers, experts, 4096 if small else None)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    rollouts = options.rollouts or (16 if small else 64)
    drawn = np.random.default_rng(0).integers(3, config.vocab_size, (rollouts + WARM_UP, 32))
    sampling = {"max_tokens": 32 if small else SEQ_LEN - 32, "temperature": 1.0, "ignore_eos": True}
    return Case(directory, device, model_types()[options.family].router_replay, drawn.tolist(), sampling)


def attempt(seconds: float, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a measurement or its error, because a failed one must not stop the others."""

    def expire(_: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not finished after {seconds:.0f} s")

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(int(seconds))
    try:
        return measure()
    except Exception as error:  # kernels, engines and models fail in many ways
        return {"error": f"{type(error).__name__}: {str(error)[-1500:]}"}
    finally:
        signal.alarm(0)


def sample(case: Case, names: Sequence[str], report: Report) -> dict[str, list[Document]]:
    """Start engines, and return the answers of those that gave any. They sample one after another."""
    servers: dict[str, Server] = {}
    documents: dict[str, list[Document]] = {}
    try:
        for name in names:
            log = report.out.with_suffix(f".{name}") / "engine.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            commands = Engines(case.recipe(ENGINES[name]), case.device, "engine", sys.executable)
            servers[name] = start_engine(commands.command(ALONE), log)
        for name, server in servers.items():

            def measure(name: str = name, server: Server = server) -> dict[str, Any]:
                start_s = server.wait("/primeslurm/status", ENGINE_S[case.device])
                documents[name], seconds = asyncio.run(rollouts(case, server.url))
                tokens = sum(int(document.mask.sum()) for document in documents[name])
                return {"tokens": tokens, "tokens_per_s": round(tokens / seconds), "start_s": round(start_s, 1)}

            report.add(report.engines, name, attempt(ENGINE_S[case.device], measure))
            server.stop()
    finally:
        for server in servers.values():
            server.stop()
    return documents


async def rollouts(case: Case, url: str) -> tuple[list[Document], float]:
    """Return the engine's answers, and the seconds that it took after a warm-up."""
    client = EngineClient(lambda: url, str(case.model))
    await client.apply(PolicyVersion(0, str(case.model)), timeout_s=ENGINE_S[case.device])
    endpoint = GenerateEndpoint(lambda: url, SEQ_LEN, timeout_s=ENGINE_S[case.device], routed=case.replay)

    async def answer(prompts: Sequence[Sequence[int]]) -> list[Completion]:
        bodies = ({"token_ids": list(prompt), "sampling_params": dict(case.sampling)} for prompt in prompts)
        return list(await asyncio.gather(*(endpoint.generate(body, {}) for body in bodies)))

    await answer(case.prompts[:WARM_UP])
    began = time.perf_counter()
    answers = await answer(case.prompts[WARM_UP:])
    seconds = time.perf_counter() - began
    await endpoint.close()
    return [document(list(p), a) for p, a in zip(case.prompts[WARM_UP:], answers, strict=True)], seconds


def packed(documents: Sequence[Document]) -> list[Row]:
    """Return rows as the trainer gets them."""
    (rows,) = pack(documents, RowLengths(SEQ_LEN, None), ranks=1)
    return Batch.decode(assembled(encode(rows, BatchInfo(1, 0, 1, 0), Common.of(documents, 1.0)))).rows


def compare(case: Case, documents: Mapping[str, list[Document]], variants: Sequence[str], report: Report) -> None:
    """Compare each engine's log-probabilities with the reference, and with every variant of the trainer."""
    alone = rank_environment(0, 1, free_port())
    os.environ |= {name: value for name, value in alone.items() if name != "OMP_NUM_THREADS"}
    from benchmarks import trainer_variants
    from primeslurm.trainer.base.interrupt import Interrupt
    from primeslurm.trainer.distributed.world import join

    world = join(Interrupt(), timeout_s=60)
    rows: dict[str, list[Row]] = {}
    for name, answers in documents.items():
        rows[name] = packed(answers)

        def refer(name: str = name, answers: list[Document] = answers) -> dict[str, Any]:
            exact = trainer_variants.reference(case.model, answers, world.device)
            rows[name] = packed([replace(a, ref_logprobs=scores) for a, scores in zip(answers, exact, strict=True)])
            engine = np.concatenate([row.logprobs[row.mask] for row in rows[name]])
            return differences(engine, np.concatenate([cast(Any, row.ref_logprobs)[row.mask] for row in rows[name]]))

        report.add(report.engines[name], "to_reference", attempt(VARIANT_S[case.device], refer))
        report.engines[name]["trainer"] = {}
    models = trainer_variants.Models(case.recipe, world)
    for engine, name, variant in trainer_variants.comparisons(tuple(rows), case.replay):

        def measure(engine: str = engine, variant: trainer_variants.Variant = variant) -> dict[str, Any]:
            ours, theirs, exact, seconds = trainer_variants.scores(models.get(variant.build), rows[engine], variant)
            to_reference = {} if exact is None else {"to_reference": differences(ours, exact)}
            return differences(ours, theirs) | {"forward_s": seconds} | to_reference

        if not variants or name in variants:
            report.add(report.engines[engine]["trainer"], name, attempt(VARIANT_S[case.device], measure))
    world.close()


def differences(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return statistics of the differences of log-probabilities [tokens]. `mismatch_kl` is the trainer's metric."""
    difference = ours.astype(np.float64) - theirs
    kl = np.expm1(difference) - difference
    return {
        "mismatch_kl": float(kl.mean()),
        "standard_error": float(kl.std() / np.sqrt(len(kl))),
        "mean_absolute": float(np.abs(difference).mean()),
        "largest": float(np.abs(difference).max()),
        "share_beyond_0.1": float((np.abs(difference) > 0.1).mean()),
    }
