"""Recurrences over packed rows: no document sees the state that an earlier one left.

Within a chunk all pairs of positions are computed at once; between chunks there is one state per head. Documents are
recognized by `positions`, which restart at 0, so there is no loop over documents and no copy to the host. Every
function takes the state before the rows, and returns the state after them.

Shapes: B rows, L positions, H heads, C chunks, l and s positions in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from primeslurm.nn.kernels import elementwise


@dataclass(frozen=True)
class Chunks:
    """Masks of the positions in chunks."""

    pairs: torch.Tensor  # [B, C, l, s]: s is not after l, and in the same document
    entered: torch.Tensor
    """[B, C, l]: l is in the document with which the previous chunk ended, so it sees that chunk's state. In the first
    chunk: l is in a document that began before these rows."""
    left: torch.Tensor  # [B, C, l]: l is in the document with which the chunk ends, so it contributes to the state


def chunks(positions: torch.Tensor, size: int) -> Chunks:
    """Return masks for rows of `positions` [B, L] in chunks of `size`. The last chunk is padded."""
    documents = in_chunks((positions == 0).cumsum(dim=1), size)
    previous = F.pad(documents[:, :-1, -1:], (0, 0, 1, 0))
    causal = torch.ones(size, size, dtype=torch.bool, device=positions.device).tril()
    return Chunks(
        pairs=causal & (documents.unsqueeze(-1) == documents.unsqueeze(-2)),
        entered=documents == previous,
        left=documents == documents[..., -1:],
    )


def in_chunks(values: torch.Tensor, size: int) -> torch.Tensor:
    missing = -values.shape[1] % size
    padded = torch.cat([values, values.new_zeros(values.shape[0], missing, *values.shape[2:])], dim=1)
    return padded.unflatten(1, (-1, size))


def decays(total: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the share [..., l, s] of position s's contribution that is left at l; 0 outside `pairs`."""
    # `total` [..., l] are sums of log decays from the start of the chunk. The diagonal does not depend on decays. Its
    # large gradients would cancel except for rounding errors, which exceed the gradients of strong decays.
    passed = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril(-1)
    return passed.masked_fill(~pairs, -torch.inf).exp()


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a depthwise convolution over each document's past, and SiLU. Return outputs and the last width - 1 inputs.

    Shapes: x [B, L, H, channels], weight [H, channels, width] with the position itself last, bias [H, channels].
    `before` are the width - 1 inputs before x.
    """
    inputs = torch.cat([before, x], dim=1)
    convolve = elementwise.fused(convolved) if elementwise.fits(x) else convolved
    return convolve(inputs, weight, bias, positions), inputs[:, x.shape[1] :].clone()


def convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of `causal_conv` for inputs with those before them, [B, width - 1 + L, H, channels]."""
    length, width = positions.shape[1], weight.shape[-1]
    out = inputs[:, width - 1 :] * weight[..., -1]
    for back in range(1, width):
        earlier = inputs[:, width - 1 - back :][:, :length]
        same_document = (positions >= back)[..., None, None]
        out = out + torch.where(same_document, earlier, 0) * weight[..., -1 - back]
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
    """Compute Mamba-2's selective state space: state = exp(dt * decay) * state + dt * x b^T, out = state c.

    Return outputs in float32 of x's shape, and the state after the rows, which is valid only if the chunk's `size`
    divides L. Shapes: x [B, L, H, head_dim], dt [B, L, H], decay (negative) [H], b and c [B, L, groups, state], where
    consecutive heads share a group, and state before the rows [B, H, state, head_dim].
    """
    length, groups = x.shape[1], b.shape[2]
    masks = chunks(positions, size)
    pairs, entered, left = (mask[:, :, None, None] for mask in (masks.pairs, masks.entered, masks.left))
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
    """Compute the gated delta rule (arXiv 2412.06464): the state decays, and its value for k moves towards v by beta.

    Return outputs in float32 of v's shape, and the state after the rows, which is valid only if the chunk's `size`
    divides L. Shapes: q and k (both are normalized here) [B, L, H, key_dim], v [B, L, H, value_dim], log_decay (not
    positive) and beta (between 0 and 1) [B, L, H], state before the rows [B, H, key_dim, value_dim].
    """
    length = v.shape[1]
    masks = chunks(positions, size)
    pairs, entered, left = (mask.unsqueeze(2) for mask in (masks.pairs, masks.entered, masks.left))
    q, k = (values.float() * torch.rsqrt(values.float().square().sum(-1, keepdim=True) + 1e-6) for values in (q, k))
    beta = beta.float().unsqueeze(-1)
    q = q * q.shape[-1] ** -0.5
    # [B, C, H, l, ...]
    q, k, v_beta, k_beta = (in_chunks(x, size).movedim(-2, 2) for x in (q, k, v.float() * beta, k * beta))
    total = in_chunks(log_decay.float(), size).movedim(-1, 2).cumsum(dim=-1)

    between = decays(total, pairs)
    from_start = total.masked_fill(~entered, -torch.inf).exp().unsqueeze(-1)
    to_end = (total[..., -1:] - total).masked_fill(~left, -torch.inf).exp().unsqueeze(-1)
    # A position's update depends on those of earlier positions in the chunk: solve for all of them. `from_zero` is the
    # update for an empty state; the update for state S is from_zero - per_state @ S.
    system = k_beta @ k.transpose(-1, -2) * between
    right = torch.cat([v_beta, k_beta * from_start], dim=-1)
    from_zero, per_state = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    attention = q @ k.transpose(-1, -2) * between
    read, write = q * from_start, (k * to_end).transpose(-1, -2)

    outs = []
    for index in range(q.shape[1]):
        update = from_zero[:, index] - per_state[:, index] @ state
        outs.append(read[:, index] @ state + attention[:, index] @ update)
        state = state * from_start[:, index, :, -1:] + write[:, index] @ update
    return torch.stack(outs, dim=1).movedim(2, -2).flatten(1, 2)[:, :length], state
