"""DSA attention at GLM-5's shape on one GPU: indexer, sparse attention forward and backward, and dense attention.

Needs an NVIDIA GPU. One document of LENGTH tokens, 64 heads, 512 + 64 values per key, 2,048 selected keys, bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from primeslurm.nn.kernels import sparse_mla
from primeslurm.nn.layers import sparse_attention

HEADS, RANK, ROPE, TOP_K = 64, 512, 64, 2048
INDEX_HEADS, INDEX_WIDTH = 32, 128
SCALE = (192 + ROPE) ** -0.5
# Scores of longer rows do not fit into memory.
DENSE_UP_TO = 8192
ROUNDS = 3


def measure(what: Callable[[], Any]) -> dict[str, float]:
    """Return the shortest time [s] and the additional peak memory."""
    what()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        what()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    peak = torch.cuda.max_memory_allocated() - before
    return {"seconds": round(min(seconds), 4), "peak_gb": round(peak / 1e9, 2)}


def attention(attend: sparse_mla.Attend, indices: torch.Tensor, length: int) -> dict[str, Any]:
    """Measure forward, and forward with backward."""
    shapes = ((1, length, HEADS, RANK + ROPE), (1, length, RANK + ROPE))
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    weight = torch.randn(1, length, HEADS, RANK, device="cuda", dtype=torch.bfloat16)

    def forward() -> None:
        with torch.no_grad():
            attend(*tensors, indices, RANK, SCALE)

    def both() -> None:
        torch.autograd.grad(attend(*tensors, indices, RANK, SCALE), tensors, weight)

    return {"forward": measure(forward), "forward_backward": measure(both)}


def selection(length: int) -> tuple[dict[str, float], torch.Tensor]:
    """Return the cost of the indexer, and the selected keys."""
    query = torch.randn(1, length, INDEX_HEADS, INDEX_WIDTH, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(1, length, INDEX_WIDTH, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1, length, INDEX_HEADS, device="cuda")
    context = sparse_attention.Context.of(torch.arange(length, device="cuda")[None])
    cost = measure(lambda: sparse_attention.select(query, keys, weight, context, TOP_K))
    return cost, sparse_attention.select(query, keys, weight, context, TOP_K)


def at(length: int) -> dict[str, Any]:
    """Return the row of one document length."""
    found: dict[str, Any] = {"length": length}
    found["select"], indices = selection(length)
    found["sparse"] = attention(sparse_mla.sparse_mla, indices, length)
    # score and value products of the selected keys; the backward pass has five products for two
    flops = 2 * HEADS * (2 * RANK + ROPE) * int((indices >= 0).sum())
    found["sparse"]["forward_tflops"] = round(flops / found["sparse"]["forward"]["seconds"] / 1e12, 1)
    if length <= DENSE_UP_TO:
        found["dense"] = attention(sparse_mla.dense_mla, indices, length)
    return found


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sparse_attention", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("lengths", nargs="*", type=int, default=[4096, 8192, 16384, 65536, 131072])
    options = parser.parse_args(words)
    torch.manual_seed(0)
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "lengths": []}
    for length in options.lengths:
        result["lengths"].append(at(length))
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result["lengths"][-1]), flush=True)
