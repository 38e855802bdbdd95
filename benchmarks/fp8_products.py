"""Time of products in bfloat16 and FP8 at real layer shapes, and of FP8's extra steps [ms].

    python -m benchmarks fp8_products ['glm5 o' ...]

Each row has a forward pass, and a forward and backward pass, in bfloat16 and in FP8 as a layer computes them; then the
parts of FP8: quantising by rows and columns (`q_`), three products, and copies. Runs on one GPU, or in emulation on a
CPU at a sixteenth of the width.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import grouped_mm

from primeslurm.nn.kernels.fp8 import blocks as quantiser
from primeslurm.nn.kernels.fp8.backend import backend
from primeslurm.nn.kernels.fp8.blocks import BLOCKS, ROWS, Groups, quantize
from primeslurm.nn.layers import fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 16384 if DEVICE == "cuda" else 256
SCALE = 1 if DEVICE == "cuda" else 16
# name: output and input features
DENSE = {
    "qwen3 q": (4096, 2048),
    "qwen3 k": (512, 2048),
    "qwen3 o": (2048, 4096),
    "glm5 q_a": (2048, 6144),
    "glm5 kv_a": (576, 6144),
    "glm5 q_b": (16384, 2048),
    "glm5 o": (6144, 16384),
    "glm5 shared gate": (2048, 6144),
    "glm5 dense gate": (12288, 6144),
}
# name: experts per rank, output and input features
EXPERTS = {
    "qwen3 gate, 64 experts": (64, 768, 2048),
    "qwen3 down, 64 experts": (64, 2048, 768),
    "glm5 gate, 16 experts": (16, 2048, 6144),
    "glm5 down, 16 experts": (16, 6144, 2048),
}


def milliseconds(work: Callable[[], Any], rounds: int = 5) -> float:
    """Return the median elapsed time after one warm-up round [ms]."""
    times = []
    for _ in range(rounds + 1):
        _wait()
        begin = time.perf_counter()
        work()
        _wait()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def passes(product: Callable[..., torch.Tensor], gradient: torch.Tensor, *inputs: torch.Tensor) -> tuple[float, float]:
    """Return the time of a forward pass, and of a forward and backward pass."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            inputs[0][:1, :1].zero_()  # otherwise the cached quantised tensor would be used again
        return product(*inputs)

    return milliseconds(forward), milliseconds(lambda: torch.autograd.grad(forward(), inputs, gradient))


def line(name: str, bf16: tuple[float, float], mine: tuple[float, float], parts: dict[str, float]) -> None:
    """Print a row of the table."""
    whole = " ".join(f"{way} {forward:.2f} {both:.2f}" for way, (forward, both) in (("bf16", bf16), ("fp8", mine)))
    shares = " ".join(f"{part} {took:.2f}" for part, took in parts.items())
    print(f"{name:24}{whole} ({bf16[1] / mine[1]:.2f}x) | {shares}", flush=True)


def dense(name: str, n: int, k: int) -> None:
    rows, weight = (torch.randn(s, k, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for s in (TOKENS, n))
    gradient = torch.randn(TOKENS, n, device=DEVICE, dtype=torch.bfloat16)
    bf16 = passes(torch.nn.functional.linear, gradient, rows, weight)
    mine = passes(fp8.linear_product, gradient, rows, weight)
    x, w, g = rows.detach(), fp8._padded(weight.detach(), -2), fp8._padded(gradient, -1)
    gemm, qx, qw, qg = backend(DEVICE), quantize(x, ROWS), quantize(w, BLOCKS), quantize(w.mT, BLOCKS)
    up, xt, gt = quantize(g, ROWS), quantize(x.mT, ROWS), quantize(g.mT, ROWS)
    parts = {
        "q_rows": milliseconds(lambda: quantize(x, ROWS)),
        "q_cols": milliseconds(lambda: quantize(x.mT, ROWS)),
        "q_grad": milliseconds(lambda: quantize(g, ROWS)),
        "q_grad_cols": milliseconds(lambda: quantize(g.mT, ROWS)),
        "q_grad_both": milliseconds(lambda: quantiser.quantize_both_ways(g)),
        "q_weight": milliseconds(lambda: quantize(w, BLOCKS)),
        "fwd": milliseconds(lambda: gemm.product(qx, qw)),
        "dgrad": milliseconds(lambda: gemm.product(up, qg)),
        "wgrad": milliseconds(lambda: gemm.outer(gt, xt)),
    }
    line(name, bf16, mine, parts)


def grouped(name: str, experts: int, n: int, k: int) -> None:
    """Time a product of experts whose loads differ by up to about a factor of two."""
    share = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.7
    offsets = (share.cumsum(0) / share.sum() * TOKENS * 8).int()
    count = int(offsets[-1])
    offsets = offsets.to(DEVICE)
    rows = torch.randn(count, k, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(experts, n, k, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(count, n, device=DEVICE, dtype=torch.bfloat16)
    bf16 = passes(lambda x, w: grouped_mm(x, w.mT, offs=offsets), gradient, rows, weight)
    mine = passes(lambda x, w: fp8.grouped_product(x, w, offsets), gradient, rows, weight)
    x, w, groups, gemm = rows.detach(), weight.detach(), Groups.of(offsets), backend(DEVICE)
    straight, across = quantiser.quantize_groups, quantiser.quantize_groups_transposed
    qx, qw, up, qg = straight(x, groups), quantize(w, BLOCKS), straight(gradient, groups), quantize(w.mT, BLOCKS)
    left, right = across(gradient, groups), across(x, groups)
    product = gemm.grouped_product(qx, qw, groups)
    parts = {
        "q_rows": milliseconds(lambda: straight(x, groups)),
        "q_cols": milliseconds(lambda: across(x, groups)),
        "q_grad": milliseconds(lambda: straight(gradient, groups)),
        "q_grad_cols": milliseconds(lambda: across(gradient, groups)),
        "q_grad_both": milliseconds(lambda: quantiser.quantize_groups_both_ways(gradient, groups)),
        "q_weight": milliseconds(lambda: quantize(w, BLOCKS)),
        "q_weight_T": milliseconds(lambda: quantize(w.mT, BLOCKS)),
        "fwd": milliseconds(lambda: gemm.grouped_product(qx, qw, groups)),
        "dgrad": milliseconds(lambda: gemm.grouped_product(up, qg, groups)),
        "wgrad": milliseconds(lambda: gemm.grouped_outer(left, right, groups)),
        "unpad": milliseconds(lambda: product.index_select(0, groups.places)),
        "groups": milliseconds(lambda: Groups.of.__wrapped__(Groups, offsets)),
        "wgrad_bf16": milliseconds(lambda: grouped_mm(gradient.mT, x, offs=offsets)),
    }
    line(name, bf16, mine, parts)


def main(words: list[str]) -> None:
    known = [*EXPERTS, *DENSE]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks fp8_products",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("products", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
    chosen = parser.parse_args(words).products or known
    if unknown := set(chosen) - {*known}:
        parser.error(f"no products are named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    print("forward, forward and backward [ms] (how many times as fast as bfloat16) | parts")
    for name, (experts, n, k) in EXPERTS.items():
        if name in chosen:
            grouped(name, experts if DEVICE == "cuda" else 4, n // SCALE, k // SCALE)
    for name, shape in DENSE.items():
        if name in chosen:
            dense(name, *(size // SCALE for size in shape))
