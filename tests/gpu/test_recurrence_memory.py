"""Recurrent layers need as much GPU memory as `primeslurm plan` predicts."""

from __future__ import annotations

import pytest

from primeslurm.models.shape import DeltaNets, Mamba
from primeslurm.plan.estimates.activations import Mixer, delta_net, mamba

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(memory_gb=10, lane="parameters", minutes=6),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTH = 16384
ESTIMATED: dict[str, Mixer] = {
    "gated_delta_net": delta_net(DeltaNets(30, 16, 32, 128, 128, 4), 2048, 2),
    "mamba_2": mamba(Mamba(23, 64, 64, 128, 8, 4, 128), 2688, 2),
}


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("kind", ESTIMATED)
def test_recomputed_layer_needs_the_estimated_memory(kind: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.recurrence_memory import LAYERS, built
    from primeslurm.nn.kernels import linear_attention

    if kernels:
        pytest.importorskip("fla")
    else:
        monkeypatch.setattr(linear_attention, "fits", lambda mixed: False)
    config, name, norm = LAYERS[kind]
    layer = built(config, name, norm, "full").cuda()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    row = torch.randn(1, LENGTH, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(LENGTH, device="cuda")[None]
    with torch.no_grad():
        layer(row, positions)  # allocates cuBLAS's workspace
    before = torch.cuda.memory_allocated()
    out = layer(row, positions)
    kept = torch.cuda.memory_allocated() - before
    assert kept < 1.1 * out.nbytes, "its output, and no more of what is inside"
    torch.cuda.reset_peak_memory_stats()
    out.backward(torch.ones_like(out))
    taken = torch.cuda.max_memory_allocated() - before - 2 * out.nbytes
    mixer = ESTIMATED[kind]
    estimated = LENGTH * 2 * mixer.kept + (mixer.kernel_part if kernels else mixer.part)
    print(f"{kind}: {taken / 1e9:.2f} GB, estimated {estimated / 1e9:.2f} GB")
    assert 0.6 * estimated < taken < 1.1 * estimated
