"""The DeepEP dispatcher, with a fake of DeepEP."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torchtitan.models.common.moe import RoutedExperts
from transformers import AutoConfig

from primeslurm.models import model_builder
from primeslurm.nn import compat
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.model_draft import ModelDraft
from primeslurm.trainer.distributed.deepep import DeepEPDispatcher, convert, split_into_chunks
from primeslurm.trainer.distributed.world import World
from tests.trainer.conftest import SEQ_LEN, make_recipe


def parallelism(**settings: Any) -> dict[str, Any]:
    return {"parallelism": {"ep_backend": "deepep"} | settings}


class FakeDeepEp(ModuleType):
    """A module with the name that identifies version 2."""

    ElasticBuffer = object


def test_missing_deepep_is_reported(moe_model: Path, world: World) -> None:
    with pytest.raises(ValueError, match=r"ep_backend = deepep: .* package deep_ep, 2\.0 or newer"):
        build(make_recipe(moe_model, trainer=parallelism()), world)


def test_every_layer_dispatches_with_deepep(moe_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher

    monkeypatch.setitem(sys.modules, "deep_ep", FakeDeepEp("deep_ep"))
    spec = model_builder.spec(AutoConfig.from_pretrained(moe_model), SEQ_LEN, "flex")
    config = spec.model
    before = list(config.traverse(AllToAllTokenDispatcher.Config))
    convert(ModelDraft(make_recipe(moe_model, trainer=parallelism(deepep_num_sms=24)), spec))
    after = [actual for _, actual, _, _ in config.traverse(DeepEPTokenDispatcher.Config)]
    assert [(c.num_experts, c.top_k) for c in after] == [(c.num_experts, c.top_k) for _, c, _, _ in before]
    assert after and not list(config.traverse(AllToAllTokenDispatcher.Config))

    from torchtitan.distributed.deepep import deepep

    assert deepep._resolve_dispatch_num_sms(None, 8, 2) == 24


def test_compiled_layers_are_rejected(moe_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", FakeDeepEp("deep_ep"))
    spec = model_builder.spec(AutoConfig.from_pretrained(moe_model), SEQ_LEN, "flex")
    with pytest.raises(ValueError, match=r"trainer\.compile: DeepEP's operations cannot be traced"):
        convert(ModelDraft(make_recipe(moe_model, trainer=parallelism() | {"compile": True}), spec))


class Alone:
    """A fake `ElasticBuffer` for a rank with all experts, which returns every token."""

    num_max_tokens_per_rank = 2**20

    def __init__(self) -> None:
        self.strides: set[int] = set()
        self.sent: list[int] = []
        """Number of tokens of each forward dispatch."""

    class Handle:
        """The handle of a dispatch."""

        num_sms = 2

        def __init__(self, experts: torch.Tensor, count: int) -> None:
            self.num_recv_tokens_per_expert_list = torch.bincount(experts.flatten(), minlength=count).tolist()

        def current_stream_wait(self) -> None:
            pass

    def get_theoretical_num_sms(self, *_: int) -> int:
        return 2

    def dispatch(self, x: torch.Tensor, **given: Any) -> tuple[Any, ...]:
        if "handle" not in given:
            self.strides.add(given["num_max_tokens_per_rank"])
            self.sent.append(len(x))
        handle = given.get("handle") or self.Handle(given["topk_idx"], given["num_experts"])
        return x.clone(), given.get("topk_idx"), given.get("topk_weights"), handle, None

    def combine(self, x: torch.Tensor, handle: Handle, **given: Any) -> tuple[Any, ...]:
        return x.clone(), given.get("topk_weights"), handle


def test_recomputed_layers_leave_no_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", FakeDeepEp("deep_ep"))
    from torchtitan.distributed.deepep import deepep

    tokens, width, experts, top_k = 64, 16, 4, 2
    dispatcher = DeepEPDispatcher.Config(num_experts=experts, top_k=top_k, num_max_tokens_per_rank=3 * tokens).build()
    dispatcher.ep_mesh = SimpleNamespace(size=lambda: 1)
    buffer = Alone()
    monkeypatch.setattr(deepep, "_buffer", buffer)
    weight = torch.randn(experts, width, width)

    def layer(x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        routed, counts, state = dispatcher.dispatch(x, scores, ids, torch.zeros(experts))
        parts = [part @ matrix for part, matrix in zip(routed.split(counts.tolist()), weight, strict=True)]
        return x + dispatcher.combine(torch.nn.functional.silu(torch.cat(parts)), state, x)

    with torch.library._scoped_library("deepep", "IMPL") as library:
        library.impl("dispatch", deepep._dispatch_op_impl, "CPU")
        library.impl("combine", deepep._combine_op_impl, "CPU")
        x, scores = torch.randn(tokens, width), torch.rand(tokens, top_k)
        ids = torch.rand(tokens, experts).topk(top_k).indices
        gradients = []
        for compute in (layer, partial(checkpoint, layer, use_reentrant=False)):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, scores)]
            out = leaves[0]
            for _ in range(5):
                out = compute(out, leaves[1], ids)
            out.square().sum().backward()
            assert len(deepep._handle_cache) <= 1
            gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*gradients)
    assert buffer.strides == {3 * tokens}  # the number is the same on all ranks, for any length of their rows


def routed(chunk: int | None) -> RoutedExperts:
    """Experts of a layer on one rank, with at most 64 tokens per dispatch."""
    dispatcher = DeepEPDispatcher.Config(num_experts=4, top_k=2, num_max_tokens_per_rank=64, chunk=chunk)
    experts = compat.AnyDtypeExperts.Config(dim=16, hidden_dim=24, num_experts=4)
    made: RoutedExperts = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher).build()
    made.token_dispatcher.ep_mesh = SimpleNamespace(get_group=lambda: None, size=lambda: 1)
    return made


@pytest.mark.parametrize("length", [32, 25, 3])
def test_tokens_are_dispatched_in_chunks(length: int, moe_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", FakeDeepEp("deep_ep"))
    from torchtitan.distributed.deepep import deepep

    buffer = Alone()
    monkeypatch.setattr(deepep, "_buffer", buffer)
    whole, cut_up = routed(None), routed(20)
    with torch.no_grad():
        for ours, theirs in zip(whole.parameters(), cut_up.parameters(), strict=True):
            theirs.copy_(ours.normal_(std=0.2))
    recipe = make_recipe(moe_model, trainer=parallelism(deepep_token_chunk=20))
    split_into_chunks(ModelDraft(recipe, None, model=torch.nn.Sequential(cut_up)))
    x, scores = torch.randn(2, length, 16), torch.rand(2, length, 2)
    ids = torch.rand(2, length, 4).topk(2).indices
    results = []
    with torch.library._scoped_library("deepep", "IMPL") as library:
        library.impl("dispatch", deepep._dispatch_op_impl, "CPU")
        library.impl("combine", deepep._combine_op_impl, "CPU")
        for layer in (whole, cut_up):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, scores)]
            out = layer(*leaves, ids, torch.zeros(4))
            out.square().sum().backward()
            results.append([out, *(leaf.grad for leaf in leaves), *(p.grad for p in layer.parameters())])
    first, *pieces = buffer.sent
    assert first == sum(pieces) == 2 * length and len(pieces) == 4 and 0 < max(pieces) <= 16
    assert buffer.strides == {64, 16}  # of the buffer, too
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours)
