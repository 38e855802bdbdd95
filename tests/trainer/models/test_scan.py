"""Segments of recurrent layers: they do not change results, and their inside is not kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.live_memory import passes
from primeslurm.models import model_builder
from primeslurm.nn.kernels import elementwise
from primeslurm.nn.layers import scan
from primeslurm.trainer.components.activation_checkpointing import POLICIES
from tests.trainer.families import BY_NAME

LENGTH = 250
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((1, 40, 209), (64, 186))])
LAYERS = [("qwen3_5_text", "delta_net"), ("nemotron_h", "mamba")]


@dataclass(frozen=True)
class Pass:
    """Results of a forward and backward pass of a layer."""

    results: list[torch.Tensor]
    """Output, and the gradients of the input and of every parameter."""
    kept: int
    """Bytes kept between the passes, without parameters."""


def layer(case_name: str, part: str) -> nn.Module:
    """Return the recurrent layer of a tiny model with random weights."""
    config = BY_NAME[case_name].config()
    torch.manual_seed(0)
    built: nn.Module = getattr(model_builder.spec(config, 64, "flex").model.layers[0], part).build()
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    return built


def run(mixer: nn.Module) -> Pass:
    owned = {parameter.untyped_storage().data_ptr() for parameter in mixer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    row = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = mixer(row, POSITIONS)
    gradients = torch.autograd.grad(out.square().sum(), [row, *mixer.parameters()])
    return Pass([out.detach(), *gradients], sum(kept.values()))


@pytest.mark.parametrize(("case_name", "part"), LAYERS)
def test_segments_do_not_change_results(case_name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = layer(case_name, part)
    whole = run(mixer)
    monkeypatch.setattr(scan, "SEGMENT_TOKENS", 2 * 64)
    for mine, expected in zip(run(mixer).results, whole.results, strict=True):
        assert (mine - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize(("case_name", "part"), LAYERS[1:])
def test_fused_operations_do_not_change_results(case_name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Traced, but not compiled: tests/gpu runs the kernels.
    mixer = layer(case_name, part)
    whole = run(mixer)
    compiled, torch_compile = [], torch.compile

    def traced(function: Callable[..., object], dynamic: bool) -> Callable[..., object]:
        compiled.append(function.__name__)
        return torch_compile(function, dynamic=dynamic, backend="aot_eager")

    elementwise.fused.cache_clear()
    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(elementwise, "fits", lambda x: True)
    monkeypatch.setattr(scan, "SEGMENT_TOKENS", 2 * 64)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        fused = run(mixer)
    elementwise.fused.cache_clear()
    assert compiled == ["convolved", {"delta_net": "normed_before", "mamba": "normed_after"}[part]]
    for mine, expected in zip(fused.results, whole.results, strict=True):
        assert (mine - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize(("case_name", "part"), LAYERS)
def test_inside_of_a_segment_is_not_kept(case_name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = layer(case_name, part)
    bounded = run(mixer).kept
    # As if there were no segments.
    monkeypatch.setattr(scan, "checkpoint", lambda function, *tensors, **options: function(*tensors))
    assert 4 * bounded < run(mixer).kept


class Decoder(nn.Module):
    """One layer, at the place where activation checkpointing looks for layers."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": mixer})

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers["0"](row, POSITIONS)
        return out


def once(decoder: Decoder, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (decoder(row),)


@pytest.mark.parametrize(("case_name", "part"), LAYERS)
def test_activation_checkpointing_keeps_less(case_name: str, part: str) -> None:
    kept = {}
    for name, policy in POLICIES.items():
        decoder = Decoder(layer(case_name, part))
        if policy is not None:
            policy.build(dump_folder="").apply(decoder)
        row = torch.randn(2, LENGTH, 32, requires_grad=True)
        kept[name] = passes(decoder, partial(once, decoder, row), [row, POSITIONS]).kept
    assert kept["full"] == 0, "besides the inputs"
    assert 0 < kept["selective"] < kept["none"]
