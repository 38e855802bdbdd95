"""Cost for an engine of loading a policy's experts.

One vLLM worker in this process has Qwen3-30B-A3B's layers and random weights. With `--thin` the matrices are small, so
that only the Python cost per expert remains. Every layer is loaded as a trainer sends it: expert by expert, then as
three stacks. All 48 layers need a GPU with 80 GB. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the worker's model is in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from vllm import LLM

from primeslurm.inference.weight_receivers.experts import held_experts
from primeslurm.inference.weight_receivers.filesystem_receiver import FilesystemTransferEngine
from primeslurm.wire.weight_transfer.catalogue import Named

EXPERTS = 128
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
THIN = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "vocab_size": 1024, "head_dim": 32}
THIN |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks expert_loading", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--thin", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(words)
    config = CONFIG | (THIN if options.thin else {}) | {"num_hidden_layers": options.layers}
    engine = make_engine(config)
    result = {
        "command": f"python -m benchmarks expert_loading --layers {options.layers}" + " --thin" * options.thin,
        "machine": torch.cuda.get_device_name() if engine.device.type == "cuda" else f"{os.cpu_count()} CPU cores",
        "load_1m": os.getloadavg()[0],
        "expert_tensors": options.layers * EXPERTS * 3,
        "one_by_one": measure(engine, config, options.repeats, whole=False),
        "stacked": measure(engine, config, options.repeats, whole=True),
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def make_engine(config: dict[str, Any]) -> FilesystemTransferEngine:
    """Return the weight-transfer engine of a worker whose model has random weights."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        llm = LLM(directory, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return FilesystemTransferEngine(None, worker.vllm_config, worker.device, worker.model_runner.model)


def measure(engine: FilesystemTransferEngine, config: dict[str, Any], repeats: int, whole: bool) -> dict[str, float]:
    """Return the median time of each part of an update."""
    held = held_experts(engine.model, enable_eplb=False)
    parts: dict[str, list[float]] = {"start_s": [], "load_s": [], "finish_s": []}
    for _ in range(repeats):
        layer = experts(config, engine.device)
        pairs = [pair for item in layer for pair in (held.loadable(item) if whole else item.each())]
        begun = now(engine.device)
        engine.start_weight_update()
        started = now(engine.device)
        engine.load(policy(config, pairs, engine.device))
        loaded = now(engine.device)
        engine.finish_weight_update()
        for name, seconds in zip(parts, (started - begun, loaded - started, now(engine.device) - loaded), strict=True):
            parts[name].append(seconds)
    medians = {name: round(statistics.median(seconds), 4) for name, seconds in parts.items()}
    count = config["num_hidden_layers"] * EXPERTS * 3
    return medians | {"load_ms_per_expert_tensor": round(1000 * medians["load_s"] / count, 5)}


def experts(config: dict[str, Any], device: torch.device) -> list[Named]:
    """Return the experts of a layer as a trainer sends them. `L` stands for the layer's number."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    name = "model.layers.L.mlp.experts.{}."
    return [
        Named(f"{name}{part}.weight", random(EXPERTS, *shape, device=device), tuple(range(EXPERTS)))
        for part, shape in shapes.items()
    ]


def policy(
    config: dict[str, Any], layer: list[tuple[str, torch.Tensor]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a policy. Its layers share their tensors, to save memory."""
    hidden, words, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate": (EXPERTS, hidden),
    }
    common = [(f"model.layers.L.{name}.weight", random(*shape, device=device)) for name, shape in shapes.items()]
    for number in range(config["num_hidden_layers"]):
        for name, tensor in (*common, *layer):
            yield name.replace("L", str(number), 1), tensor
    yield "model.embed_tokens.weight", random(words, hidden, device=device)
    yield "model.norm.weight", random(hidden, device=device)
    yield "lm_head.weight", random(words, hidden, device=device)


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def now(device: torch.device) -> float:
    """Return the time [s] after the device has finished all work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
