"""vLLM's expert layers accept a worker's experts as one stack, with the same parameters and complete element counts.

If a test fails after a change of vLLM, check `RoutedExperts.weight_loader` (which takes [experts, rows, columns] as
`full_load`), `RoutedExperts.load_weights` (which takes an expert's name literally) and the layerwise reload (which
counts elements).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.quantization import resolve_quantization_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.models.utils import AutoWeightsLoader

from primeslurm.inference.weight_receivers.experts import HeldExperts, held_experts, incomplete_experts
from primeslurm.inference.weight_receivers.filesystem_receiver import FilesystemTransferEngine
from primeslurm.inference.weight_receivers.layerwise import PolicyError
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.weight_transfer.catalogue import Named, stacked

pytestmark = pytest.mark.engine
PREFIX = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INTERMEDIATE = 8, 256, 512
SHAPES = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp": {"tp": (1, 2)},
    "tp, padded to FP8 blocks": {"tp": (5, 8)},
    "ep": {"ep": (1, 2)},
    "ep, dealt out": {"ep": (1, 2), "placement": "round_robin"},
}
FORMATS: dict[str, QuantizationConfig | None] = {
    "bfloat16": None,
    "FP8": Fp8Config(True, "dynamic", None, [128, 128]),
    "to FP8": OnlineQuantizationConfig(resolve_quantization_config("fp8_per_block", None)),
}
"""Formats of a model: bfloat16 weights, an FP8 checkpoint, and weights that vLLM quantises."""


def make_layer(
    kind: str = "bfloat16", tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1), placement: Any = "linear"
) -> RoutedExperts:
    """Return the experts of a layer on one rank of a tensor- or expert-parallel group, ready for a reload."""
    parallel = FusedMoEParallelConfig(
        tp_rank=tp[0],
        tp_size=tp[1],
        ep_rank=ep[0],
        ep_size=ep[1],
        use_ep=ep[1] > 1,
        dp_rank=0,
        dp_size=1,
        pcp_rank=0,
        pcp_size=1,
        sp_size=1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    manager = ExpertMapManager(16, 2, EXPERTS, 0, None, parallel, placement, enable_eplb=False)
    config = FusedMoEConfig(
        num_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        num_local_experts=manager.local_num_experts,
        experts_per_token=2,
        hidden_dim=HIDDEN,
        intermediate_size=INTERMEDIATE,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )
    with pytest.MonkeyPatch.context() as patch:
        # FP8 code reads the group from there
        patch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=tp[1]))
        layer = RoutedExperts(PREFIX, torch.bfloat16, config, FORMATS[kind], manager)
    # Only padding is the loader's concern; kernels may pack the weights further.
    layer.quant_method.process_weights_after_loading = getattr(layer.quant_method, "_zero_padding", lambda layer: None)
    record_metadata_for_reloading(layer)
    return layer


def sent(fp8: bool) -> list[Named]:
    """Return all experts as a trainer sends them."""
    generator = torch.Generator().manual_seed(0)
    experts = stacked(
        (f"{PREFIX}.{expert}.{name}_proj.weight", torch.randn(shape, generator=generator).bfloat16())
        for expert in range(EXPERTS)
        for name, shape in SHAPES.items()
    )
    encoding = Encoding(torch.bfloat16, fp8)
    return [Named(name, tensor, item.experts) for item in experts for name, tensor in encoding.encode(*item).items()]


def part(item: Named, experts: tuple[int, ...]) -> Named:
    """Return the experts that a worker is sent."""
    return Named(item.name, item.tensor[list(experts)], experts)


def load(layer: RoutedExperts, pairs: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Load within vLLM's layerwise reload, and return the layer's parameters."""
    initialize_layerwise_reload(layer)
    list(layer.load_weights((name.removeprefix(f"{PREFIX}."), tensor) for name, tensor in pairs))
    assert incomplete_experts(layer) == []
    finalize_layerwise_reload(layer, None)
    return {name: parameter.clone() for name, parameter in layer.named_parameters()}


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    """Yield within a vLLM configuration, which layers need."""
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_stack_loads_like_single_experts(layout: dict[str, Any], kind: str) -> None:
    layer, alone = make_layer(kind, **layout), make_layer(kind, **layout)
    held = held_experts(layer, enable_eplb=False)
    assert held.order is not None and len(held.order) == EXPERTS // layout.get("ep", (0, 1))[1]
    assert held.wanted == (frozenset(held.order) if "ep" in layout else None)
    items = [part(item, held.order) for item in sent(fp8=kind == "FP8")]
    pairs = [pair for item in items for pair in held.loadable(item)]
    assert len(pairs) == len(items) == (6 if kind == "FP8" else 3), "one call for each stack"

    loaded = load(layer, pairs)
    expected = load(alone, [pair for item in items for pair in item.each()])
    assert loaded.keys() == expected.keys() and len(loaded) == (4 if kind == "FP8" else 2)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert tensor.float().abs().sum() > 0


class Model(torch.nn.Module):
    """A layer of experts with a selection bias, which the router has under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_bias = torch.nn.Parameter(torch.zeros(EXPERTS), requires_grad=False)
        self.experts = make_layer()
        self.experts.e_score_correction_bias = self.expert_bias
        record_metadata_for_reloading(self)

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(tensors)


def make_engine() -> FilesystemTransferEngine:
    """Return a weight-transfer engine around such a model, without a vLLM worker."""
    engine = FilesystemTransferEngine(None, VllmConfig(), torch.device("cpu"), Model())
    config = SimpleNamespace(tie_word_embeddings=False)
    engine.model_config = SimpleNamespace(hf_config=config, hf_text_config=config, dtype=torch.bfloat16)
    return engine


def update(engine: FilesystemTransferEngine, items: list[Named]) -> None:
    """Update the engine with these stacks and a bias of ones."""
    held = held_experts(engine.model, enable_eplb=False)
    engine.start_weight_update()
    pairs = [pair for item in items for pair in held.loadable(item)]
    named = [(name.replace(PREFIX, "experts"), tensor) for name, tensor in pairs]
    engine.load(iter([*named, ("expert_bias", torch.ones(EXPERTS))]))
    engine.finish_weight_update()


def test_incomplete_experts_are_refused() -> None:
    engine = make_engine()
    gate, up, down = sent(fp8=False)
    for incomplete in ([gate, part(up, tuple(range(EXPERTS - 1))), down], [gate, down]):
        with pytest.raises(PolicyError, match=rf"experts of 1 layers: {PREFIX}"):
            update(engine, incomplete)
    update(engine, [down, up, gate])
    experts = engine.model.experts
    assert torch.equal(experts.w13_weight, torch.cat([gate.tensor, up.tensor], dim=1))
    assert torch.equal(experts.w2_weight, down.tensor)
    assert experts.e_score_correction_bias is engine.model.expert_bias
    assert torch.equal(engine.model.expert_bias, torch.ones(EXPERTS))


def test_unstackable_experts_are_loaded_one_by_one() -> None:
    beside = make_layer()
    beside.expert_map_manager.num_fused_shared_experts = 1
    assert held_experts(beside, enable_eplb=False).order is None
    assert held_experts(make_layer(ep=(1, 2)), enable_eplb=True) == HeldExperts(None, None)
    differing = torch.nn.ModuleList([make_layer(ep=(rank, 2)) for rank in range(2)])
    assert held_experts(differing, enable_eplb=False) == HeldExperts(None, None)

    bias = Named(f"{PREFIX}.{{}}.up_proj.bias", torch.ones(EXPERTS, INTERMEDIATE), tuple(range(EXPERTS)))
    held = HeldExperts(None, tuple(range(EXPERTS)))
    assert len(list(held.loadable(bias))) == EXPERTS
