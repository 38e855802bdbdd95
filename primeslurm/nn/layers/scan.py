"""What a recurrent layer does between its projections: each head for itself, along whole rows, one part after another.

Only what a part begins with is kept for the backward pass, which computes a part's inside anew when it gets there. So
memory inside does not grow with rows, and what is kept of a token is little more than the layer's projections.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from primeslurm.nn.block_sizes import KERNEL_CHUNK_TOKENS, RECURRENCE_CHUNK_TOKENS
from primeslurm.nn.kernels import linear_attention
from primeslurm.nn.layers.recurrence import causal_conv

NO_BIASES = (None, None, None)
"""Of convolutions that have none."""

Tensors = Sequence[torch.Tensor]
Parameters = Sequence[torch.Tensor | None]
Step = Callable[[Tensors, Tensors], tuple[torch.Tensor, Tensors]]


class HeadScan(nn.Module):
    """Short convolutions of queries, keys and values, then a recurrence whose states map keys to values.

    It has no parameters: it is told those of its heads. Heads are counted along dimension 2 of what comes by token and
    dimension 0 of what comes by head. Values have all heads, the others may have fewer: consecutive heads share one.
    """

    def __init__(self, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads = heads
        """Of the whole layer."""
        self.chunk = chunk
        """Positions that are computed at once."""

    def forward(self, by_token: Tensors, by_head: Parameters, positions: torch.Tensor) -> torch.Tensor:
        """Run along rows.

        Args:
            by_token: queries, keys, values, and what `recur` takes, [rows, length, heads, ...].
            by_head: weights and biases (if there are any) of the three convolutions, and parameters of `recur`,
                [heads, ...].
            positions: [rows, length]; state and convolution begin anew where they are 0.

        Returns:
            Outputs as float32, [rows, length, heads, value size].
        """
        width = _existing(by_head[0]).shape[-1]
        k, v = by_token[1:3]
        state = v.new_zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float32)
        before = [part.new_zeros(len(part), width - 1, *part.shape[2:]) for part in by_token[:3]]

        def step(carried: Tensors, inputs: Tensors) -> tuple[torch.Tensor, Tensors]:
            return self._step(carried, inputs[:-1], by_head, inputs[-1])

        tokens = KERNEL_CHUNK_TOKENS if linear_attention.fits(by_token[:3]) else RECURRENCE_CHUNK_TOKENS
        return in_parts(step, (*before, state), (*by_token, positions), self.chunk, tokens)

    @abstractmethod
    def recur(
        self, mixed: Tensors, rest: Tensors, parameters: Tensors, positions: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of a part of the rows, and the state it leaves.

        Args:
            mixed: queries, keys and values.
            rest: what else came by token.
            parameters: what else came by head.
            positions: [rows, length].
            state: [rows, heads, key size, value size].
        """

    def _step(
        self, carried: Tensors, by_token: Tensors, by_head: Parameters, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Tensors]:
        *before, state = carried
        convolved = [
            causal_conv(part, _existing(weight), bias, positions, past)
            for part, weight, bias, past in zip(by_token[:3], by_head[:3], by_head[3:6], before, strict=True)
        ]
        mixed, after = zip(*convolved, strict=True)
        out, state = self.recur(mixed, by_token[3:], [_existing(p) for p in by_head[6:]], positions, state)
        return out, (*after, state)


def _existing(parameter: torch.Tensor | None) -> torch.Tensor:
    assert parameter is not None
    return parameter


def in_parts(
    step: Step, carried: Tensors, inputs: Tensors, chunk: int = 1, tokens: int = RECURRENCE_CHUNK_TOKENS
) -> torch.Tensor:
    """Run `step(carried, inputs)` over parts of rows, and again in the backward pass.

    Args:
        step: returns outputs, and what it carries to the next part.
        carried: for the first part.
        inputs: [rows, length, ...] each.
        chunk: a part has a multiple of so many positions.
        tokens: of a part, in all rows together.
    """
    size = max(tokens // len(inputs[0]) // chunk, 1) * chunk
    count = len(inputs)  # checkpoints keep `run`: it must not know whole rows, which may be computed anew themselves

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, after = step(tensors[:-count], tensors[-count:])
        return (out, *after)

    outs = []
    for part in zip(*(tensor.split(size, dim=1) for tensor in inputs), strict=True):
        out, *carried = checkpoint(run, *carried, *part, use_reentrant=False, preserve_rng_state=False)
        outs.append(out)
    return torch.cat(outs, dim=1)
