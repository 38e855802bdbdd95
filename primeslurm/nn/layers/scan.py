"""The core of recurrent layers, without their projections, computed per head in segments of rows.

Only the state at the start of each segment is kept; the backward pass recomputes the segment. Memory inside a segment
therefore does not grow with the rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from primeslurm.nn.block_sizes import KERNEL_SEGMENT_TOKENS, SEGMENT_TOKENS
from primeslurm.nn.kernels import elementwise, linear_attention
from primeslurm.nn.layers.recurrence import causal_conv

# Biases of the three convolutions if there are none
NO_BIASES = (None, None, None)

Tensors = Sequence[torch.Tensor]
Parameters = Sequence[torch.Tensor | None]
Step = Callable[[Tensors, Tensors], tuple[torch.Tensor, Tensors]]
Gating = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class HeadScan(nn.Module):
    """Short convolutions of queries, keys and values, then a recurrence whose states map keys to values.

    It has no parameters: the layer passes those of the heads that this rank computes. Queries and keys may have fewer
    heads than values: consecutive heads of values then share one.
    """

    def __init__(self, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads = heads  # number of heads of the whole layer
        self.chunk = chunk  # positions that the recurrence computes at once

    def forward(self, by_token: Tensors, by_head: Parameters, positions: torch.Tensor) -> torch.Tensor:
        """Return outputs in float32, [rows, length, heads, value size].

        `by_token` are queries, keys, values and further inputs of `recur`, [rows, length, heads, ...]. `by_head` are
        the weights of the three convolutions, their biases (or None) and the parameters of `recur`, [heads, ...]. State
        and convolution start at zero wherever `positions` [rows, length] are 0.
        """
        width = _present(by_head[0]).shape[-1]
        k, v = by_token[1:3]
        state = v.new_zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float32)
        before = [tensor.new_zeros(len(tensor), width - 1, *tensor.shape[2:]) for tensor in by_token[:3]]

        def step(carried: Tensors, inputs: Tensors) -> tuple[torch.Tensor, Tensors]:
            return self._step(carried, inputs[:-1], by_head, inputs[-1])

        tokens = KERNEL_SEGMENT_TOKENS if linear_attention.fits(by_token[:3]) else SEGMENT_TOKENS
        return in_segments(step, (*before, state), (*by_token, positions), self.chunk, tokens)

    @abstractmethod
    def recur(
        self, mixed: Tensors, rest: Tensors, parameters: Tensors, positions: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of a segment and the state after it, [rows, heads, key size, value size].

        `mixed` are queries, keys and values after the convolutions; `rest` and `parameters` are further inputs.
        """

    def _step(
        self, carried: Tensors, by_token: Tensors, by_head: Parameters, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Tensors]:
        *before, state = carried
        convolved = [
            causal_conv(values, _present(weight), bias, positions, past)
            for values, weight, bias, past in zip(by_token[:3], by_head[:3], by_head[3:6], before, strict=True)
        ]
        mixed, after = zip(*convolved, strict=True)
        out, state = self.recur(mixed, by_token[3:], [_present(p) for p in by_head[6:]], positions, state)
        return out, (*after, state)


def _present(parameter: torch.Tensor | None) -> torch.Tensor:
    assert parameter is not None
    return parameter


def in_segments(
    step: Step, carried: Tensors, inputs: Tensors, chunk: int = 1, tokens: int = SEGMENT_TOKENS
) -> torch.Tensor:
    """Run `step(carried, inputs)` over segments of inputs [rows, length, ...], and again in the backward pass.

    A step returns outputs, and the tensors to carry to the next segment. A segment has about `tokens` tokens over all
    rows, and its length is a multiple of `chunk`.
    """
    size = max(tokens // len(inputs[0]) // chunk, 1) * chunk
    # Checkpoints keep `run` alive, so it must not hold whole rows: those may be recomputed themselves.
    count = len(inputs)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, after = step(tensors[:-count], tensors[-count:])
        return (out, *after)

    outs = []
    for segment in zip(*(tensor.split(size, dim=1) for tensor in inputs), strict=True):
        # Nothing inside is random, so the RNG state need not be saved.
        out, *carried = checkpoint(run, *carried, *segment, use_reentrant=False, preserve_rng_state=False)
        outs.append(out)
    return torch.cat(outs, dim=1)


def gated(gating: Gating, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply norm and gate, in the order of `gating` (`normed_before`, `normed_after`), to a recurrence's output.

    x (float32) and gate are [rows, length, groups, size], and the norm's weight is [size] or [groups, size]. Each group
    is normalized by itself. The result has the gate's dtype.
    """
    if elementwise.fits(gate):  # one kernel, which keeps only its inputs
        return elementwise.fused(gating)(x, gate, weight, eps)

    def segment(_: Tensors, inputs: Tensors) -> tuple[torch.Tensor, Tensors]:
        return gating(inputs[0], inputs[1], weight, eps), ()

    return in_segments(segment, (), (x, gate))


def normed_before(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize x, then multiply by the gate's SiLU, as gated delta nets do."""
    return (weight.float() * _normed(x, eps) * F.silu(gate.float())).to(gate.dtype)


def normed_after(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Multiply x by the gate's SiLU, then normalize, as Mamba-2 does."""
    return (weight.float() * _normed(x * F.silu(gate.float()), eps)).to(gate.dtype)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
