"""Layers with a running state, over packed rows: a document never sees the state that the one before it left.

Everything is computed in chunks: within a chunk all pairs of positions at once, between chunks one state per head.
That a document begins shows in `positions`, which restart at 0; no loop over documents, no copy to the host. Every
function takes what an earlier part of the rows left, and returns what a later part needs.

Shapes: B rows, L positions, H heads, C chunks, l and s positions in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from primeslurm.nn.kernels import elementwise


@dataclass(frozen=True)
class Chunks:
    """What a position of a chunk has in common with other positions, as masks."""

    pairs: torch.Tensor
    """[B, C, l, s]: s is not after l, and in the same document."""
    entered: torch.Tensor
    """[B, C, l]: in the document that the chunk before ended with, whose state it therefore sees. In the first chunk:
    in no document that begins in these rows."""
    left: torch.Tensor
    """[B, C, l]: in the document that the chunk ends with, into whose state it therefore goes."""


def chunks(positions: torch.Tensor, size: int) -> Chunks:
    """Make masks for rows of `positions`, [B, L], in chunks of `size` (the last one filled up)."""
    documents = in_chunks((positions == 0).cumsum(dim=1), size)
    previous = F.pad(documents[:, :-1, -1:], (0, 0, 1, 0))
    causal = torch.ones(size, size, dtype=torch.bool, device=positions.device).tril()
    return Chunks(
        pairs=causal & (documents.unsqueeze(-1) == documents.unsqueeze(-2)),
        entered=documents == previous,
        left=documents == documents[..., -1:],
    )


def in_chunks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Cut [B, L, ...] into [B, C, size, ...], filled up with zeros."""
    missing = -values.shape[1] % size
    filled = torch.cat([values, values.new_zeros(values.shape[0], missing, *values.shape[2:])], dim=1)
    return filled.unflatten(1, (-1, size))


def decays(total: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """How much of what position s added is left at position l, [..., l, s]; 0 where l does not see s.

    Args:
        total: sums of log decays from a chunk's beginning, [..., l].
        pairs: who sees whom, [..., l, s].
    """
    # A position's own share does not depend on decays: left in, its large gradient would cancel but for rounding,
    # which is more than the gradients of strong decays are.
    passed = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril(-1)
    return passed.masked_fill(~pairs, -torch.inf).exp()


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A depthwise convolution over each document's past, and SiLU.

    Args:
        x: [B, L, H, channels].
        weight: [H, channels, width]; the last column is for the position itself.
        bias: [H, channels].
        positions: [B, L].
        before: the width - 1 inputs before x.

    Returns:
        Outputs, and the last width - 1 inputs.
    """
    inputs = torch.cat([before, x], dim=1)
    chain = elementwise.fused(convolved) if elementwise.fits(x) else convolved
    return chain(inputs, weight, bias, positions), inputs[:, x.shape[1] :].clone()


def convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """What `causal_conv` returns first, of inputs with those before them, [B, width - 1 + L, H, channels]."""
    length, width = positions.shape[1], weight.shape[-1]
    out = inputs[:, width - 1 :] * weight[..., -1]
    for back in range(1, width):
        earlier = inputs[:, width - 1 - back :][:, :length]
        reachable = (positions >= back)[..., None, None]
        out = out + torch.where(reachable, earlier, 0) * weight[..., -1 - back]
    return F.silu(out if bias is None else out + bias)


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    positions: torch.Tensor,
    state: torch.Tensor,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selective state space of Mamba-2: state = exp(dt * decay) * state + dt * x b^T, and out = state c.

    Args:
        x: [B, L, H, head_dim].
        dt: time steps, [B, L, H].
        decay: of each head, negative, [H].
        b: into the state, [B, L, groups, state]; consecutive heads share a group.
        c: out of the state, of the shape of b.
        positions: [B, L].
        state: that the rows before left, [B, H, state, head_dim].
        size: positions in a chunk.

    Returns:
        Outputs as float32, of the shape of x, and the state that these rows leave. If `size` does not divide L, no
        state that anything could follow on.
    """
    length, groups = x.shape[1], b.shape[2]
    where = chunks(positions, size)
    pairs, entered, left = (mask[:, :, None, None] for mask in (where.pairs, where.entered, where.left))
    dt = dt.float()
    # [B, C, groups, heads of a group, l, ...]
    steps = in_chunks(dt * decay.float(), size).movedim(-1, 2).unflatten(2, (groups, -1))
    x = in_chunks(x.float() * dt.unsqueeze(-1), size).movedim(-2, 2).unflatten(2, (groups, -1))
    b, c = (in_chunks(values.float(), size).movedim(-2, 2).unsqueeze(3) for values in (b, c))

    total = steps.cumsum(dim=-1)
    between = decays(total, pairs)
    inside = (c @ b.transpose(-1, -2) * between) @ x
    to_end = (total[..., -1:] - total).masked_fill(~left, -torch.inf).exp()
    added = b.transpose(-1, -2) @ (x * to_end.unsqueeze(-1))
    from_start = total.masked_fill(~entered, -torch.inf).exp()

    state = state.unflatten(1, (groups, -1))
    entering = []
    for index in range(added.shape[1]):
        entering.append(state)
        state = state * from_start[:, index, ..., -1:, None] + added[:, index]
    out = inside + (c @ torch.stack(entering, dim=1)) * from_start.unsqueeze(-1)
    return out.flatten(2, 3).movedim(2, -2).flatten(1, 2)[:, :length], state.flatten(1, 2)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    positions: torch.Tensor,
    state: torch.Tensor,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule: state decays, forgets what it holds for k by beta, and learns v for k; out = q state.

    Args:
        q: [B, L, H, key_dim]; it is normalised here.
        k: of the shape of q; it is normalised here.
        v: [B, L, H, value_dim].
        log_decay: not positive, [B, L, H].
        beta: in (0, 1), [B, L, H].
        positions: [B, L].
        state: that the rows before left, [B, H, key_dim, value_dim].
        size: positions in a chunk.

    Returns:
        Outputs as float32, of the shape of v, and the state that these rows leave. If `size` does not divide L, no
        state that anything could follow on.
    """
    length = v.shape[1]
    where = chunks(positions, size)
    pairs, entered, left = (mask.unsqueeze(2) for mask in (where.pairs, where.entered, where.left))
    q, k = (values.float() * torch.rsqrt(values.float().square().sum(-1, keepdim=True) + 1e-6) for values in (q, k))
    beta = beta.float().unsqueeze(-1)
    q = q * q.shape[-1] ** -0.5
    # [B, C, H, l, ...]
    q, k, v_beta, k_beta = (in_chunks(x, size).movedim(-2, 2) for x in (q, k, v.float() * beta, k * beta))
    total = in_chunks(log_decay.float(), size).movedim(-1, 2).cumsum(dim=-1)

    between = decays(total, pairs)
    from_start = total.masked_fill(~entered, -torch.inf).exp().unsqueeze(-1)
    to_end = (total[..., -1:] - total).masked_fill(~left, -torch.inf).exp().unsqueeze(-1)
    # What each position really learns: for an empty state, and for each dimension of the state that enters the chunk.
    system = k_beta @ k.transpose(-1, -2) * between
    both = torch.cat([v_beta, k_beta * from_start], dim=-1)
    learned, known = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    attention = q @ k.transpose(-1, -2) * between
    read, write = q * from_start, (k * to_end).transpose(-1, -2)

    outs = []
    for index in range(q.shape[1]):
        new = learned[:, index] - known[:, index] @ state
        outs.append(read[:, index] @ state + attention[:, index] @ new)
        state = state * from_start[:, index, :, -1:] + write[:, index] @ new
    return torch.stack(outs, dim=1).movedim(2, -2).flatten(1, 2)[:, :length], state
