"""Models with attention sinks, Mamba-2 and gated delta nets on a GPU against the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.models.layers.recurrence import gated_delta_rule, state_space
from tests.trainer.conftest import make_recipe
from tests.trainer.families import CASES, Case, write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = (1, 127, 300, 84)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
FAMILIES = ("gpt_oss", "nemotron_h", "nemotron_h-latent", "qwen3_5_text", "qwen3_5_moe_text")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(1, sum(LENGTHS), *shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ssm(x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    decay = -torch.arange(1.0, 9.0, device=x.device)
    state = torch.zeros(1, 8, 128, 64, device=x.device)
    return state_space(x, dt.abs(), decay, b, c, at, state, size=128)[0]


def _delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(1, 8, 128, 128, device=q.device)
    return gated_delta_rule(q, k, v, -gates.abs(), torch.sigmoid(gates), at, state, size=64)[0]


@pytest.mark.parametrize(
    ("scan", "shapes"),
    [
        pytest.param(_ssm, [(8, 64), (8,), (2, 128), (2, 128)], id="state-space"),
        pytest.param(_delta, [(8, 128), (8, 128), (8, 128), (8,)], id="delta-rule"),
    ],
)
def test_scans(scan: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]]) -> None:
    results = []
    for device in ("cpu", "cuda"):
        inputs = [_random(*shape).to(device).requires_grad_() for shape in shapes]
        out = scan(*inputs, POSITIONS.to(device))
        out.square().sum().backward()
        results.append([out.detach().cpu(), *(tensor.grad.cpu() for tensor in inputs if tensor.grad is not None)])
    assert len(results[0]) == len(shapes) + 1
    for mine, expected in zip(results[1], results[0], strict=True):
        assert (mine - expected).abs().max() < 1e-4 * expected.abs().max()


def _wide(case: Case) -> Case:
    """Heads as wide as attention kernels are made for."""

    def config() -> object:
        made = case.config()
        made.head_dim = 64
        return made

    return Case(case.name, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in CASES if case.name in FAMILIES], ids=lambda case: case.name)
def test_logits_and_gradients(case: Case, dtype: str, world: World, tmp_path: Path) -> None:
    path = write(_wide(case), tmp_path)
    policy = build(make_recipe(path, seq_len=sum(LENGTHS), model={"path": str(path), "dtype": dtype}), world)
    tokens = torch.randint(3, 128, POSITIONS.shape, generator=torch.Generator().manual_seed(1)).cuda()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().cuda()
    alone = torch.cat([reference(part).logits for part in tokens.split(LENGTHS, dim=1)], dim=1)
    packed = policy.logits(tokens, POSITIONS.cuda())[0]
    for logits in (alone, packed):
        logits.float().log_softmax(-1).gather(-1, tokens.roll(-1, 1)[..., None]).mean().backward()

    error = (packed - alone).abs()
    # In bfloat16 a token near the border between two experts may take the other one.
    assert error.max() < 1e-3 if dtype == "float32" else error.median() < 0.05 * alone.abs().max()
    got = policy.adapter.to_hf({name: p.grad.full_tensor() for name, p in policy.model.named_parameters()})
    name = "model.embed_tokens.weight"
    mine = got.get(name, got.get("backbone.embeddings.weight"))
    expected = reference.get_input_embeddings().weight.grad
    assert mine is not None and expected is not None
    difference = (mine - expected).norm() / expected.norm()
    assert difference < (1e-3 if dtype == "float32" else 0.3)
