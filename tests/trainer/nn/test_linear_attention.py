"""Calls of flash-linear-attention match our plain recurrences.

The documented recurrences stand in for the kernels, which tests/gpu tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from primeslurm.nn.kernels import linear_attention
from primeslurm.nn.layers import recurrence

ROWS = [[1, 1, 40, 22, 64], [100, 28]]
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ROWS])
LENGTH = 128
HEADS, SHARED, KEYS, VALUES = 4, 2, 32, 16
Function = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def by_step(q: Any, k: Any, v: Any, g: Any, state: Any, scale: float, beta: Any = None) -> Any:
    """The recurrence position by position: decay the state, then update the value of k by `beta`."""
    dtype = v.dtype
    q, k, v = (part.float().repeat_interleave(v.shape[2] // part.shape[2], dim=2) for part in (q, k, v))
    outs = []
    for at in range(v.shape[1]):
        state = state * g[:, at].exp()[..., None, None]
        new = v[:, at]
        if beta is not None:
            new = (new - (k[:, at].unsqueeze(-2) @ state).squeeze(-2)) * beta[:, at].unsqueeze(-1)
        state = state + k[:, at].unsqueeze(-1) * new.unsqueeze(-2)
        outs.append((q[:, at].unsqueeze(-2) @ state).squeeze(-2) * scale)
    return torch.stack(outs, dim=1).to(dtype), state


def simple_gla(q: Any, k: Any, v: Any, g: Any, scale: float, initial_state: Any, output_final_state: bool) -> Any:
    assert output_final_state
    return by_step(q, k, v, g, initial_state, scale)


def delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
) -> Any:
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    return by_step(q, k, v, g, initial_state, q.shape[-1] ** -0.5, beta)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, member, function in (
        ("simple_gla", "chunk_simple_gla", simple_gla),
        ("gated_delta_rule", "chunk_gated_delta_rule", delta_rule),
    ):
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, member, function)
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(2, LENGTH, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def _plain_delta(q: Any, k: Any, v: Any, g: Any, beta: Any, at: Any, state: Any) -> Any:
    q, k = (part.repeat_interleave(HEADS // SHARED, dim=2) for part in (q, k))
    return recurrence.gated_delta_rule(q, k, v, g, beta, at, state, 64)


def _plain_space(x: Any, dt: Any, decay: Any, b: Any, c: Any, at: Any, state: Any) -> Any:
    return recurrence.state_space(x, dt, decay, b, c, at, state, 64)


def _delta_inputs() -> list[torch.Tensor]:
    gates = _random(HEADS)
    return [
        _random(SHARED, KEYS),
        _random(SHARED, KEYS) + 1,
        _random(HEADS, VALUES),
        -gates.abs() * torch.tensor([0.01, 0.1, 1.0, 30.0]),
        torch.sigmoid(gates),
    ]


def _space_inputs() -> list[torch.Tensor]:
    decay = -torch.tensor([0.01, 0.5, 4.0, 30.0])
    return [_random(HEADS, VALUES), _random(HEADS).abs(), decay, _random(SHARED, KEYS), _random(SHARED, KEYS) + 1]


@pytest.mark.parametrize(
    ("kernel", "plain", "make"),
    [
        pytest.param(linear_attention.gated_delta_rule, _plain_delta, _delta_inputs, id="delta-rule"),
        pytest.param(linear_attention.state_space, _plain_space, _space_inputs, id="state-space"),
    ],
)
def test_outputs_states_and_gradients(
    kernel: Function, plain: Function, make: Callable[[], list[torch.Tensor]]
) -> None:
    """Rows start in the middle of a document with an earlier state. Other documents begin and end in them."""
    positions = POSITIONS + torch.tensor([[0], [7]])
    positions[:, 64:] = POSITIONS[:, 64:]
    begun = torch.randn(2, HEADS, KEYS, VALUES, generator=torch.Generator().manual_seed(3))
    results = []
    for compute in (kernel, plain):
        inputs = [tensor.clone().requires_grad_() for tensor in (*make(), begun)]
        out, state = compute(*inputs[:-1], positions, inputs[-1])
        assert out.dtype == torch.float32
        gradients = torch.autograd.grad(out.square().sum() + state.square().sum(), inputs)
        results.append([out.detach(), state.detach(), *gradients])
    for index, (mine, expected) in enumerate(zip(*results, strict=True)):
        assert (mine - expected).abs().max() < 1e-4 * expected.abs().max(), index


def test_documents_do_not_see_earlier_documents() -> None:
    outs = []
    for factor in (1.0, 1000.0):
        q, k, v, g, beta = _delta_inputs()
        v[:, :100] *= factor
        outs.append(linear_attention.gated_delta_rule(q, k, v, g, beta, POSITIONS, torch.zeros(2, HEADS, KEYS, VALUES)))
    assert torch.equal(outs[0][0][1, 100:], outs[1][0][1, 100:])
    assert torch.equal(outs[0][1][1], outs[1][1][1])


def test_cpu_uses_plain_recurrences() -> None:
    assert not linear_attention.fits([torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)])


@pytest.mark.parametrize(
    ("dtype", "size", "reason"),
    [(torch.float32, 64, "bfloat16"), (torch.bfloat16, 24, "multiples of 16"), (torch.bfloat16, 512, "up to 256")],
)
def test_unsupported_inputs_of_the_kernels(dtype: torch.dtype, size: int, reason: str) -> None:
    actual = linear_attention._unfit(((dtype, size),))
    assert actual is not None
    assert reason in actual
