"""FLOPs of documents, and of models of known size."""

from __future__ import annotations

import numpy as np
import pytest

from primeslurm.models.catalog import catalog
from primeslurm.models.flops import Work, flops, layer_weights
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.gpus import GPUS
from primeslurm.trainer.policy.flops_meter import Peak, peak_of

QWEN = catalog()["Qwen/Qwen3-30B-A3B"].shape
GLM = catalog()["zai-org/GLM-5.1"].shape


@pytest.mark.parametrize("name", catalog())
def test_layers_have_the_active_parameters(name: str) -> None:
    shape = catalog()[name].shape
    parameters = count(shape)
    active = parameters.active - shape.vocab * shape.hidden
    indexer = 0
    if shape.indexer and shape.mla:
        i = shape.indexer
        indexer = shape.attention_layers * (shape.mla.q_rank * i.heads * i.dim + shape.hidden * (i.dim + i.heads))
    # The rest are norms, biases and short convolutions, whose work is not counted.
    assert layer_weights(shape) == pytest.approx(active - indexer, rel=0.005)


def test_documents_add_up_and_see_no_other_document() -> None:
    positions = np.concatenate([np.arange(5), np.arange(3)])
    assert Work.of(positions, QWEN).pairs == 15 + 6
    assert Work.of(np.arange(5), QWEN) + Work.of(np.arange(3), QWEN) == Work.of(positions, QWEN)
    assert Work.of(np.arange(8), QWEN).pairs == 36


def test_selection_and_window_bound_the_keys_of_a_query() -> None:
    assert GLM.indexer is not None
    top_k = GLM.indexer.top_k
    length = top_k + 10
    work = Work.of(np.arange(length), GLM)
    assert work.selected_pairs == sum(min(seen, top_k) for seen in range(1, length + 1))
    assert work.pairs == length * (length + 1) // 2


def test_only_trained_tokens_have_logits() -> None:
    positions = np.arange(100)
    head = 2 * QWEN.hidden * QWEN.vocab
    without, some = (flops(QWEN, Work.of(positions, QWEN, trained)) for trained in (0, 40))
    assert some.step - without.step == pytest.approx(3 * 40 * head)


def test_adapters_leave_forward_pass_and_gradients_of_activations() -> None:
    work = Work.of(np.arange(100), QWEN, 50)
    whole, adapted = flops(QWEN, work), flops(QWEN, work, adapters=1_000_000)
    products = 2 * (layer_weights(QWEN) * 100 + QWEN.hidden * QWEN.vocab * 50)
    assert whole.step - adapted.step == pytest.approx(products - 3 * 2 * 1_000_000 * 100)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", Peak(989, 1979)),
        ("NVIDIA H100 80GB HBM3", Peak(989, 1979)),
        ("NVIDIA H100 PCIe", Peak(756, 1513)),
        ("NVIDIA H20", Peak(148, 296)),
        ("NVIDIA A100-SXM4-80GB", Peak(312, None)),
        ("NVIDIA GB200", Peak(2500, 5000)),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("cpu", None),
    ],
)
def test_peak_is_found_by_device_name(device: str, peak: Peak | None) -> None:
    assert peak_of(device) == peak


def test_planner_and_trainer_agree_on_peaks() -> None:
    for name, gpu in GPUS.items():
        peak = peak_of(name)
        assert peak is not None and peak.bf16 == gpu.bf16_tflops
