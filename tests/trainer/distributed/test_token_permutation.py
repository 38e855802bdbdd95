"""The token dispatcher matches torchtitan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from transformers import AutoConfig

from primeslurm.models import model_builder
from primeslurm.nn.kernels import rows
from primeslurm.trainer.base.model_draft import ModelDraft
from primeslurm.trainer.distributed.token_permutation import OrderedDispatcher, _by_expert, _by_padded_expert, convert
from tests.support.rows import inverted
from tests.trainer.conftest import SEQ_LEN, make_recipe

EXPERTS, TOP_K, TOKENS, DIM = 16, 4, 96, 24
Found = tuple[torch.Tensor, ...]


def mixed(kind: Any, dtype: torch.dtype, **settings: Any) -> Found:
    """Return outputs of linear experts, and gradients of tokens and scores."""
    torch.manual_seed(0)
    tokens = torch.randn(TOKENS, DIM, dtype=torch.float64).to(dtype).requires_grad_()
    weights = (torch.randn(EXPERTS, DIM, DIM, dtype=torch.float64) / DIM**0.5).to(dtype)
    scores, chosen = torch.rand(TOKENS, EXPERTS - 1).topk(TOP_K)  # the last expert gets no token
    scores.requires_grad_()
    dispatcher = kind(kind.Config(num_experts=EXPERTS, top_k=TOP_K, **settings))
    rows, counts, how = dispatcher.dispatch(tokens, scores, chosen, torch.bincount(chosen.flatten(), minlength=EXPERTS))
    assert settings == {} or ((counts % settings["alignment"] == 0).all() and counts[-1] == 0)
    outputs = torch.cat([part @ weight for part, weight in zip(rows.split(counts.tolist()), weights, strict=True)])
    result = dispatcher.combine(outputs, how, tokens)
    result.backward(torch.randn(TOKENS, DIM, dtype=torch.float64).to(dtype))
    assert tokens.grad is not None and scores.grad is not None
    return result.detach(), tokens.grad, scores.grad


@pytest.mark.parametrize("settings", [{}, {"alignment": 8}], ids=["as they are", "filled up"])
def test_values_and_gradients_match_torchtitan(settings: dict[str, Any]) -> None:
    found = mixed(OrderedDispatcher, torch.float32, **settings)
    expected = mixed(AllToAllTokenDispatcher, torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_as_exact_as_torchtitan() -> None:
    exact = mixed(AllToAllTokenDispatcher, torch.float32)
    ours, theirs = mixed(OrderedDispatcher, torch.bfloat16), mixed(AllToAllTokenDispatcher, torch.bfloat16)
    for name, one, other, right in zip(("tokens", "grad", "scores"), ours, theirs, exact, strict=True):
        assert one.dtype == other.dtype, name
        assert (one - right).norm() <= 1.05 * (other - right).norm() + 1e-6 * right.norm(), name


def test_spread_and_gathered_are_each_others_gradients() -> None:
    owner = torch.tensor([7, 0, 4, 5, 1, 9])  # of 5 rows with 2 slots; row 1 has no copy, some have one
    where = inverted(owner, 5, 2)
    assert torch.equal(where.flatten()[owner], torch.arange(6))
    assert where.flatten().tolist().count(-1) == 4
    few, many = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 6))
    weights = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(rows.spread(few, where, owner), few[owner // 2])
    assert torch.autograd.gradcheck(lambda x: rows.spread(x, where, owner), (few,))
    assert torch.autograd.gradcheck(lambda x: rows.gathered(x, where, owner), (many,))
    assert torch.autograd.gradcheck(lambda x, w: rows.gathered(x, where, owner, w), (many, weights))
    assert not rows.gathered(many, where, owner, weights)[1].any()


def test_padding_rows_change_nothing() -> None:
    torch.manual_seed(0)
    own, top_k = 5, 3
    ids = torch.rand(40, own + 3).topk(top_k).indices.clamp(max=own)  # the last is nobody's
    ids[ids == 2] = own  # an expert without tokens
    actual = torch.bincount(ids.flatten(), minlength=own + 1)[:own]
    counts = (actual + 7) // 8 * 8
    filled = _by_padded_expert(ids, actual, counts, 7).first(int(counts.sum()))
    plain = _by_expert(ids, own).first(int(actual.sum()))
    few, weights = torch.randn(40, 4, dtype=torch.float64), torch.rand(40, top_k, dtype=torch.float64)
    made = []
    for copies, sizes in ((filled, counts), (plain, actual)):
        x, w = few.clone().requires_grad_(), weights.clone().requires_grad_()
        each = [part[:size] for part, size in zip(copies.spread(x).split(sizes.tolist()), actual, strict=True)]
        assert all(
            not part[size:].any() for part, size in zip(copies.spread(x).split(sizes.tolist()), actual, strict=True)
        )
        out = copies.gathered(copies.spread(x).sin(), w)
        out.square().sum().backward()
        made.append((torch.cat(each), out, x.grad, w.grad))
    for ours, theirs in zip(*made, strict=True):
        assert ours is not None and torch.equal(ours, theirs)


def test_no_rows_are_dispatched() -> None:
    where, owner = torch.full((4, 2), -1), torch.empty(0, dtype=torch.int64)
    empty = torch.empty(0, 3, requires_grad=True)
    weights = torch.ones(4, 2, requires_grad=True)
    found = rows.gathered(empty, where, owner, weights)
    assert torch.equal(found, torch.zeros(4, 3))
    found.sum().backward()
    assert weights.grad is not None and not weights.grad.any()
    assert rows.spread(torch.ones(4, 3), where, owner).shape == (0, 3)


@pytest.mark.parametrize(("settings", "kind"), [({}, OrderedDispatcher), ({"compile": True}, AllToAllTokenDispatcher)])
def test_every_moe_layer_uses_it_unless_compiled_on_cpu(moe_model: Path, settings: dict[str, Any], kind: Any) -> None:
    config = model_builder.spec(AutoConfig.from_pretrained(moe_model), SEQ_LEN, "flex")
    draft = ModelDraft(make_recipe(moe_model, trainer=settings), config)
    before = [(found.num_experts, found.top_k) for _, found, _, _ in _dispatchers(draft)]
    convert(draft)
    after = [found for _, found, _, _ in _dispatchers(draft)]
    assert after and all(type(found) is kind.Config for found in after)
    assert [(found.num_experts, found.top_k) for found in after] == before


def _dispatchers(draft: ModelDraft) -> list[Any]:
    return list(draft.config.traverse(AllToAllTokenDispatcher.Config))
