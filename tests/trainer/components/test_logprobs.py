"""Chunked log-probabilities against whole logits: values, gradients, and in the sharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components.logprobs import token_logprobs
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from tests.trainer.conftest import make_batch, make_recipe, make_timer
from tests.trainer.families import BY_NAME, write

ROWS, LENGTH, DIM, VOCABULARY = 2, 30, 8, 17


class Products(TorchDispatchMode):
    """Counts new tensors of a shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += isinstance(result, torch.Tensor) and tuple(result.shape) == self.shape
        return result


def scores(
    chunk: int | None,
    dtype: torch.dtype,
    trained: float = 0.7,
    logits: torch.dtype | None = None,
    exact: bool = False,
    frozen: bool = False,
) -> list[torch.Tensor]:
    """Return log-probs, entropies, and gradients of hidden states and head for a weighted loss.

    Args:
        exact: Compute everything in float32, from values of `dtype`.
        frozen: Return no gradient of the head.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, LENGTH)
    hidden = torch.randn(*shape, DIM, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, DIM, generator=generator).to(dtype)
    if exact:
        hidden, weight = hidden.float(), weight.float()
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    temperatures = 0.5 + torch.rand(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < trained
    places = mask.flatten().nonzero().squeeze(1)
    logprobs, entropy = token_logprobs(hidden, weight, labels[mask], temperatures[mask], places, chunk, logits)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    (logprobs * torch.randn(logprobs.shape, generator=generator)).sum().backward()
    assert hidden.grad is not None and (weight.grad is None) == frozen
    return [logprobs.detach(), entropy, hidden.grad, *([] if weight.grad is None else [weight.grad])]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_match_whole_logits(chunk: int) -> None:
    for mine, expected in zip(scores(chunk, torch.float32), scores(None, torch.float32), strict=True):
        torch.testing.assert_close(mine, expected, atol=5e-6, rtol=1e-5)


def test_bfloat16_chunks_round_like_whole_logits() -> None:
    for mine, expected in zip(scores(7, torch.bfloat16), scores(None, torch.bfloat16), strict=True):
        assert mine.dtype == expected.dtype
        torch.testing.assert_close(mine, expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("chunk", [7, None])
def test_float32_logits_are_those_of_a_float32_model(chunk: int | None) -> None:
    """Logits from bfloat16 inputs stay float32. Their gradients are rounded once."""
    expected = scores(chunk, torch.bfloat16, exact=True)
    wide = scores(chunk, torch.bfloat16, logits=torch.float32)
    for mine, other in zip(wide[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine, other, atol=5e-6, rtol=1e-5)
    for mine, other in zip(wide[2:], expected[2:], strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, other.bfloat16(), atol=2e-2, rtol=2e-2)
    rounded = scores(chunk, torch.bfloat16)
    assert (rounded[0] - expected[0]).abs().max() > 100 * (wide[0] - expected[0]).abs().max()


@pytest.mark.parametrize("chunk", [7, None])
def test_a_frozen_head_gets_no_gradient(chunk: int | None) -> None:
    """With LoRA, the head is frozen. The gradient of hidden states is the same."""
    free, frozen = (scores(chunk, torch.bfloat16, logits=torch.float32, frozen=f) for f in (False, True))
    assert torch.equal(free[2], frozen[2])
    assert len(frozen) == 3


def test_chunks_do_not_compute_the_gradient_of_a_frozen_head() -> None:
    weight = torch.randn(VOCABULARY, DIM)
    with Products((VOCABULARY, DIM)) as products:
        hidden = torch.randn(1, 9, DIM, requires_grad=True)
        labels, places = torch.zeros(9, dtype=torch.long), torch.arange(9)
        token_logprobs(hidden, weight, labels, torch.ones(9), places, 4)[0].sum().backward()
    assert products.count == 0


def test_no_trained_token_gives_no_gradient() -> None:
    logprobs, entropy, *gradients = scores(7, torch.float32, trained=0.0)
    assert logprobs.shape == entropy.shape == (0,)
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3_moe"])
def test_step_with_chunks_matches_step_without(name: str, world: World, tmp_path: Path) -> None:
    model = write(BY_NAME[name], tmp_path / "model")
    metrics = []
    for chunk in (None, 13):
        trainer = {"memory": {"lm_head_chunk": chunk}, "optimizer": {"lr": 1e-3}}
        recipe = make_recipe(model, trainer=trainer)
        train_step = TrainStep(build(recipe, world), recipe, world)
        steps = [train_step.train(make_batch(step), make_timer(tmp_path)) for step in (1, 2)]
        metrics.append([step[name] for step in steps for name in ("loss", "entropy", "grad_norm")])
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)
