"""Time and errors of token dispatch in expert parallelism: torch's all-to-all and DeepEP.

    python -m benchmarks token_dispatch --shape qwen3_30b_a3b --ranks 2 --backends torch deepep --out R.json

One layer's dispatch and combine as in the trainer, forward and backward, with random routing. Expert e only scales its
tokens, so the exact result and gradients are known. Errors are relative to the whole result; the two backends differ by
the rounding of bfloat16. Times are medians of the slower rank, including the permutation into the experts' order and
back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support import ranks

# Hidden size, number of experts, and experts per token.
SHAPES = {"tiny": (64, 8, 2), "qwen3_30b_a3b": (2048, 128, 8), "glm5": (6144, 256, 8)}
WARM_UP = 3


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks token_dispatch", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, default=16384, help="of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", nargs="+", choices=["torch", "deepep"], default=["torch"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="also write the result there; the last option")
    return parser.parse_args(words)


def dispatcher(backend: str, shape: tuple[int, int, int], tokens: int, mesh: Any) -> Any:
    """Return the dispatcher of a trainer layer with this `ep_backend`."""
    from primeslurm.trainer.distributed import deepep, token_permutation

    hidden, experts, top_k = shape
    made = (
        token_permutation.OrderedDispatcher.Config(num_experts=experts, top_k=top_k)
        if backend == "torch"
        else deepep.DeepEPDispatcher.Config(
            num_experts=experts, top_k=top_k, num_max_tokens_per_rank=tokens, hidden_dim=hidden
        )
    ).build()
    made.wire_meshes(ep_mesh=mesh)
    return made


class Case:
    """Tokens of this rank, their routing, and the exact result."""

    def __init__(self, shape: tuple[int, int, int], tokens: int, rank: int, device: Any) -> None:
        import torch

        hidden, self.experts, top_k = shape
        draw = torch.Generator(device).manual_seed(rank)
        self.x = torch.randn(tokens, hidden, generator=draw, device=device).bfloat16()
        self.gradient = torch.randn(tokens, hidden, generator=draw, device=device).bfloat16()
        logits = torch.randn(tokens, self.experts, generator=draw, device=device)
        self.scores, self.ids = logits.softmax(-1).topk(top_k, sorted=False)
        self.counts = torch.bincount(self.ids.flatten(), minlength=self.experts)
        # Equal on all ranks, exact in bfloat16, and different for neighbours.
        self.scale = (torch.arange(self.experts, device=device) % 7 + 1).bfloat16()
        weight = (self.scores * self.scale[self.ids].float()).sum(1, keepdim=True)
        self.wanted = (
            self.x.float() * weight,
            self.gradient.float() * weight,
            (self.x.float() * self.gradient.float()).sum(1, keepdim=True) * self.scale[self.ids].float(),
        )

    def forward(self, made: Any, rank: int, world_size: int) -> tuple[Any, Any, Any]:
        """Send the tokens to their experts and back. Return the result, and the inputs with gradients."""
        x, scores = self.x.clone().requires_grad_(), self.scores.clone().requires_grad_()
        routed, counts, state = made.dispatch(x, scores, self.ids, self.counts)
        own = self.scale.chunk(world_size)[rank]
        rows = own.repeat_interleave(counts.to(own.device), output_size=int(counts.sum()))
        return made.combine(routed[: rows.shape[0]] * rows[:, None], state, x), x, scores

    def errors(self, made: Any, rank: int, world_size: int) -> dict[str, float]:
        """Return the relative errors of the result and of both gradients."""
        out, x, scores = self.forward(made, rank, world_size)
        out.backward(self.gradient)
        found = zip(("out", "grad_x", "grad_scores"), (out, x.grad, scores.grad), self.wanted, strict=True)
        return {name: float((got.detach().float() - must).norm() / must.norm()) for name, got, must in found}


def milliseconds(step: Callable[[], Any], rounds: int, world: Any) -> float:
    """Return the median time of a step that all ranks begin together [ms]."""
    import torch

    times = []
    for _ in range(WARM_UP + rounds):
        world.barrier()
        began = time.perf_counter()
        step()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[WARM_UP:])


def measure(options: argparse.Namespace, world: Any) -> dict[str, Any]:
    """Measure each backend with all ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("ep",))["ep"]
    shape = SHAPES[options.shape]
    case = Case(shape, options.tokens, world.rank, world.device)
    found: dict[str, Any] = {}
    for backend in options.backends:
        made = dispatcher(backend, shape, options.tokens, mesh)

        def both(made: Any = made) -> None:
            out, *_ = case.forward(made, world.rank, world.size)
            out.backward(case.gradient)

        def forward(made: Any = made) -> None:
            with torch.no_grad():
                case.forward(made, world.rank, world.size)

        errors = world.collect(case.errors(made, world.rank, world.size))
        times = [milliseconds(step, options.rounds, world) for step in (forward, both)]
        slowest = [max(each) for each in zip(*world.collect(times), strict=True)]
        found[backend] = {
            "errors": {name: round(max(each[name] for each in errors), 6) for name in errors[0]},
            "forward_ms": round(slowest[0], 3),
            "forward_backward_ms": round(slowest[1], 3),
        }
    return found


def main(words: list[str]) -> None:
    options = arguments(words)

    def measured(world: Any) -> dict[str, Any]:
        import torch

        gpu = torch.cuda.get_device_name() if world.device.type == "cuda" else None
        return {"gpu": gpu, **measure(options, world)}

    ranks.run("token_dispatch", words, options.ranks, options.out, measured)
