"""The memory model compared with measurements.

Trainer rows are prime-rl's published peaks (BENCHMARKS.md of January and February 2026: torch's reserved memory,
without CP or EP, full activation recomputation; LM head in chunks of about 8192 x 8192 logits for RL and LoRA, whole
for SFT). Two constants of the model (bytes per logit, copies of a routed token) were chosen with these rows in view.
With --measure: parameters that transformers builds from the same configs, the KV cache that vLLM allocates on the CPU
for a tiny model, and the prompt logits that its GPU runner holds at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from primeslurm.models.catalog import CATALOG, catalog
from primeslurm.models.hf_config import shape_of
from primeslurm.plan.estimates.engine_memory import EngineLayout, kv_bytes_per_token, prompt_logit_bytes
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.estimates.trainer_memory import TrainerLayout, lora_parameters, trainer_memory
from primeslurm.plan.gpus import GIB

RESULT = Path(__file__).resolve().parent / "results" / "memory_model.json"
# Logits per chunk of prime-rl's fused LM head.
PIECE = 8192 * 8192
RANK = 16


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    model: str
    gpus: int
    mode: str
    """rl, lora or sft."""
    seq_len: int
    measured_gib: float
    activation_offload: bool = False


_30B, _4B, _06B, _106B = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", "PrimeIntellect/INTELLECT-3"
TRAINER_ROWS = (
    Row(_30B, 8, "rl", 16384, 74.6),
    Row(_30B, 8, "rl", 65536, 105.4),
    Row(_30B, 8, "lora", 16384, 31.6),
    Row(_30B, 8, "lora", 65536, 63.7),
    Row(_30B, 8, "sft", 16384, 106.4),
    Row(_4B, 8, "rl", 16384, 17.1),
    Row(_4B, 8, "rl", 65536, 36.1),
    Row(_4B, 8, "lora", 65536, 28.8),
    Row(_4B, 8, "sft", 16384, 54.6),
    Row(_106B, 8, "lora", 16384, 89.7),
    Row(_106B, 8, "lora", 65536, 128.8, activation_offload=True),
    Row(_06B, 1, "rl", 16384, 12.5),
    Row(_06B, 1, "rl", 65536, 19.6),
    Row(_06B, 1, "sft", 16384, 52.8),
)


def predicted_gib(row: Row) -> float:
    """Return the model's prediction of torch's allocation."""
    shape = catalog()[row.model].shape
    layout = TrainerLayout(
        shard=row.gpus,
        ep=1,
        tokens=row.seq_len,
        checkpointing="full",
        activation_offload=row.activation_offload,
        logit_tokens=None if row.mode == "sft" else PIECE // shape.vocab,
        lora_parameters=lora_parameters(shape, RANK) if row.mode == "lora" else 0,
    )
    return trainer_memory(shape, layout).allocated / GIB


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory_model", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure with transformers and vLLM (a minute)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args(words)
    rows = []
    for row in TRAINER_ROWS:
        predicted = predicted_gib(row)
        error = predicted / row.measured_gib - 1
        rows.append({**asdict(row), "predicted_gib": round(predicted, 1), "error_percent": round(100 * error, 1)})
    worst = max(abs(row["error_percent"]) for row in rows)
    mean = sum(abs(row["error_percent"]) for row in rows) / len(rows)
    summary = {"mean_absolute_error_percent": round(mean, 1), "worst_error_percent": worst}
    parameters = {
        name: {"published_b": entry.parameters_b, "counted_b": round(_count(name), 2)}
        for name, entry in catalog().items()
    }
    command = "python -m benchmarks memory_model --measure --write"
    result = {"command": command, "trainer_gib": {**summary, "rows": rows}, "parameters": parameters}
    if options.measure:
        result |= {
            "built_by_transformers": built_parameters(),
            "kv_cache_of_vllm": kv_cache(),
            "prompt_logits_of_vllm": prompt_logits(),
        }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.write:
        RESULT.write_text(text)


def built_parameters() -> list[dict[str, object]]:
    """Count the parameters of the models that transformers builds (on the meta device) from the catalog's configs."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    rows: list[dict[str, object]] = []
    for name, entry in json.loads(CATALOG.read_bytes()).items():
        seeing = "vision_config" in entry["config"]
        config = dict(entry["config"] if seeing else entry["config"].get("text_config", entry["config"]))
        config.pop("quantization_config", None)
        if config["model_type"] == "kimi_k2":
            config["model_type"] = "deepseek_v3"  # the same architecture, which transformers has itself
        built_by = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
        with torch.device("meta"):
            model = built_by.from_config(AutoConfig.for_model(**config))
        built, counted = sum(p.numel() for p in model.parameters()), count(shape_of(config)).total
        rows.append({"model": name, "built": built, "counted": counted, "error_percent": _percent(counted, built)})
    return rows


def kv_cache() -> dict[str, object]:
    """Return the tokens that fit into vLLM's KV cache of a given size, for a tiny model on the CPU."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    from vllm import LLM

    from scripts.models import tiny_model

    size = 64 * 2**20
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        tiny_model.write_model(path)
        shape = shape_of(json.loads((path / "config.json").read_bytes()))
        engine = LLM(str(path), dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=size, max_model_len=1024)
        config = engine.llm_engine.vllm_config.cache_config
    allocated = config.num_gpu_blocks * config.block_size
    per_token = kv_bytes_per_token(shape, EngineLayout(1, 1, 2, 2, False, 8192, False, None))
    predicted = size // per_token
    return {"bytes": size, "tokens": allocated, "predicted": predicted, "error_percent": _percent(predicted, allocated)}


def prompt_logits() -> dict[str, object]:
    """Return the memory of vLLM's loop over prompt tokens, without its Triton kernel, which creates no logits."""
    from types import SimpleNamespace
    from unittest.mock import patch

    import torch
    from vllm.v1.worker.gpu.sample import prompt_logprob

    from benchmarks.live_memory import LiveMemory

    def gathered(logits: torch.Tensor, _: int, sampled: torch.Tensor, **__: object) -> SimpleNamespace:
        ids = sampled.unsqueeze(-1)
        return SimpleNamespace(logprob_token_ids=ids, logprobs=logits.gather(-1, ids), selected_token_ranks=sampled)

    shape = catalog()["Qwen/Qwen3-0.6B"].shape
    head, hidden = torch.randn(shape.vocab, 8, dtype=torch.bfloat16), torch.randn(4096, 8, dtype=torch.bfloat16)
    tokens = torch.randint(0, shape.vocab, (len(hidden),))
    score = prompt_logprob.compute_prompt_logprobs_with_chunking
    kernel = patch.object(prompt_logprob, "compute_topk_scores", gathered)
    with kernel, LiveMemory([head, hidden, tokens]) as memory:
        score(tokens, hidden, lambda piece: torch.nn.functional.linear(piece, head), 0)
    predicted = prompt_logit_bytes(shape, EngineLayout(1, 1, 2, 2, False, len(hidden), False, None))
    measured = {"tokens": len(hidden), "vocab": shape.vocab, "bytes": memory.peak}
    return measured | {"predicted": predicted, "error_percent": _percent(predicted, memory.peak)}


def _percent(predicted: float, measured: float) -> float:
    return round(100 * (predicted / measured - 1), 3)


def _count(name: str) -> float:
    return count(catalog()[name].shape).total / 1e9
