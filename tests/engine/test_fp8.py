"""An engine that was not built from an FP8 checkpoint loads an FP8 policy."""

from __future__ import annotations

import pytest
import torch

from primeslurm.inference.weight_receivers import layerwise
from primeslurm.inference.weight_receivers.layerwise import PolicyError, dequantised
from primeslurm.nn.kernels.fp8.blocks import BLOCKS, quantize
from primeslurm.trainer.weights.export import Encoding

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("order", [1, -1], ids=["weights first", "scales first"])
def test_fp8_weights_and_scales_may_arrive_in_any_order(order: int) -> None:
    torch.manual_seed(0)
    encoding = Encoding(torch.bfloat16, fp8=True)
    sent = {f"layers.{i}.up_proj.weight": torch.randn(200, 130).bfloat16() for i in range(3)} | {"norm": torch.ones(4)}
    encoded = {key: value for name, tensor in sent.items() for key, value in encoding.encode(name, tensor).items()}
    taken = dict(dequantised(iter(list(encoded.items())[::order]), torch.bfloat16))
    assert set(taken) == set(sent)
    assert torch.equal(taken["norm"], sent["norm"])
    for name in sent.keys() - {"norm"}:
        assert taken[name].dtype == torch.bfloat16
        again = quantize(taken[name], BLOCKS)
        assert torch.equal(again.data.view(torch.uint8), encoded[name].view(torch.uint8)), (
            "quantised again it is the same"
        )


def test_stack_equals_its_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "_ELEMENTS_AT_ONCE", 2 * 200 * 130)  # two matrices, and the last one alone
    quantised = quantize(torch.randn(3, 200, 130), BLOCKS)
    stack = {"up_proj.weight": quantised.data, "up_proj.weight_scale_inv": quantised.scales}
    weights = dict(dequantised(iter(stack.items()), torch.float32))["up_proj.weight"]
    assert torch.equal(weights, quantised.values())


def test_a_weight_without_scales_is_refused() -> None:
    quantised = quantize(torch.randn(8, 8), BLOCKS)
    weight, scales = quantised.data, quantised.scales
    with pytest.raises(PolicyError, match="up_proj"):
        list(dequantised(iter([("up_proj.weight", weight)]), torch.bfloat16))
    with pytest.raises(PolicyError, match="up_proj"):
        list(dequantised(iter([("up_proj.weight_scale_inv", scales)]), torch.bfloat16))
