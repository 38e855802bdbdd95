"""Recurrences in chunks, compared with the same recurrence token by token and document by document."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from primeslurm.nn.layers.recurrence import causal_conv, gated_delta_rule, state_space

DOCUMENTS = ((1, 16, 20, 9), (4, 3, 39))
"""Lengths in two rows: documents within a chunk of 16, across chunks, and starting with a chunk."""
LENGTH, HEADS, KEYS, VALUES = 46, 4, 8, 6
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])


def random(*shape: int) -> torch.Tensor:
    """Return float64 values that depend on the shape only."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(2, LENGTH, *shape, generator=generator, dtype=torch.float64)


def step_by_step(update: Callable[[int, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return outputs [2, LENGTH, HEADS, VALUES] of `update(row, position, state) -> (state, output)`."""
    rows = []
    for row in range(2):
        outputs = []
        state = torch.zeros(HEADS, KEYS, VALUES, dtype=torch.float64)
        for at in range(LENGTH):
            if POSITIONS[row, at] == 0:
                state = torch.zeros_like(state)
            state, output = update(row, at, state)
            outputs.append(output)
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def in_two(scan: Callable[..., tuple[torch.Tensor, torch.Tensor]], *inputs: torch.Tensor) -> torch.Tensor:
    """Return outputs of `scan(*inputs, positions, state)` over the first two chunks, then over the rest."""
    state = torch.zeros(2, HEADS, KEYS, VALUES)
    outputs = []
    for part in zip(*(tensor.split([32, LENGTH - 32], dim=1) for tensor in (*inputs, POSITIONS)), strict=True):
        out, state = scan(*part, state=state)
        outputs.append(out)
    return torch.cat(outputs, dim=1)


def test_state_space() -> None:
    x, b, c = random(HEADS, VALUES), random(2, KEYS), random(2, KEYS).flip(1)
    dt, decay = random(HEADS).abs(), -torch.arange(1.0, HEADS + 1)

    def update(row: int, at: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        into, out = (values[row, at].repeat_interleave(HEADS // 2, dim=0) for values in (b, c))
        state = torch.exp(dt[row, at] * decay)[:, None, None] * state
        state = state + into[:, :, None] * (dt[row, at, :, None] * x[row, at])[:, None]
        return state, (out[:, None] @ state)[:, 0]

    got = in_two(lambda *inputs, state: state_space(*inputs[:2], decay, *inputs[2:], state, size=16), x, dt, b, c)
    torch.testing.assert_close(got, step_by_step(update).float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("strength", [0.0, 10.0])
def test_gated_delta_rule(strength: float) -> None:
    q, k, v = random(HEADS, KEYS), random(HEADS, KEYS).flip(1), random(HEADS, VALUES)
    log_decay, beta = (-strength - random(HEADS).abs()).requires_grad_(), torch.sigmoid(random(HEADS))

    def update(row: int, at: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = (torch.nn.functional.normalize(values[row, at], dim=-1) for values in (q, k))
        state = torch.exp(log_decay[row, at])[:, None, None] * state
        wrong = v[row, at] - (key[:, None] @ state)[:, 0]
        state = state + key[:, :, None] * (beta[row, at, :, None] * wrong)[:, None]
        return state, (query[:, None] * KEYS**-0.5 @ state)[:, 0]

    got = in_two(lambda *inputs, state: gated_delta_rule(*inputs, state, size=16), q, k, v, log_decay, beta)
    expected = step_by_step(update)
    torch.testing.assert_close(got, expected.float(), atol=2e-5, rtol=1e-4)
    weights = random(HEADS, VALUES).flip(2)
    mine, theirs = (torch.autograd.grad((out * weights).sum(), log_decay)[0] for out in (got, expected))
    # Gradients of strong decays are small, but rounding errors are smaller.
    assert (mine - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("with_bias", [False, True])
def test_causal_conv(with_bias: bool) -> None:
    x, weight = random(HEADS, 3), torch.randn(HEADS, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    bias = torch.arange(12.0).double().unflatten(0, (HEADS, 3)) if with_bias else None
    before = torch.zeros(2, 3, HEADS, 3, dtype=torch.float64)
    outputs = []
    for part, positions in zip(
        x.split([20, LENGTH - 20], dim=1), POSITIONS.split([20, LENGTH - 20], dim=1), strict=True
    ):
        out, before = causal_conv(part, weight, bias, positions, before)
        outputs.append(out)
    got = torch.cat(outputs, dim=1).flatten(2)
    for row, lengths in enumerate(DOCUMENTS):
        for document, expected in zip(got[row].split(lengths), x[row].flatten(1).split(lengths), strict=True):
            past = torch.nn.functional.pad(expected.T, (3, 0))
            channels = None if bias is None else bias.flatten()
            one = torch.nn.functional.conv1d(past, weight.flatten(0, 1).unsqueeze(1), channels, groups=12)
            torch.testing.assert_close(document, torch.nn.functional.silu(one).T)
