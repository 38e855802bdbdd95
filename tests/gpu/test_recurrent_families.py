"""Models with attention sinks, Mamba-2 and gated delta nets on a GPU compared with the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from primeslurm.models.nemotron_h.mamba import MambaScan
from primeslurm.models.qwen3_5.delta_net import DeltaScan
from primeslurm.nn.kernels import linear_attention
from primeslurm.nn.layers import scan
from primeslurm.nn.layers.recurrence import gated_delta_rule, state_space
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from tests.trainer.conftest import make_recipe
from tests.trainer.families import CASES, Case, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(lane="function", minutes=6),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

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


def _scan_inputs(kind: str, rows: list[list[int]]) -> tuple[scan.HeadScan, list[torch.Tensor], list[torch.Tensor]]:
    """Return a recurrent layer's core at full width (Qwen3.5-35B-A3B, Nemotron-3-Nano), and its inputs by token and by
    head.
    """
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    count, length = len(rows), sum(rows[0])
    steps = torch.linspace(0, 2.7, {"delta": 32, "mamba": 64}[kind], device="cuda")  # log of decays 1 to 15
    if kind == "delta":
        widths, tokens = ((16, 128), (16, 128), (32, 128)), ((32,), (32,))
        heads, made = (random(32) - 3, steps), DeltaScan(32, 64)
    else:
        widths, tokens = ((8, 128), (8, 128), (64, 64)), ((64,),)
        heads, made = (random(64) - 3, steps, random(64)), MambaScan(64, 128, 0.0)
    by_token = [random(count, length, *shape) for shape in (*widths, *tokens)]
    by_head = [*(random(*shape, 4) / 2 for shape in widths), *(random(*shape) / 10 for shape in widths), *heads]
    return made, by_token, by_head


def _scanned(made: scan.HeadScan, inputs: list[torch.Tensor], tokens: int, at: torch.Tensor) -> list[torch.Tensor]:
    """Return outputs, and gradients of all inputs: first those by token, then by head."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = made(leaves[:tokens], leaves[tokens:], at)
    seed = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(9), device="cuda")
    return [out.detach().float(), *(grad.float() for grad in torch.autograd.grad((out * seed).sum(), leaves))]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([[4096]], id="one-document"),
        pytest.param([[1, 1, 1, 125, 900, 3068], [2047, 1, 2048]], id="two-rows-of-documents"),
        pytest.param([[5] * 800 + [96]], id="short-documents"),
        pytest.param([[3000, 17, 983 + 77]], id="not-a-multiple-of-a-chunk"),
    ],
)
@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_kernels_against_the_plain_recurrence(
    kind: str, rows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 2,048 tokens, so that states are passed on. Both may differ as much as bfloat16 does."""
    pytest.importorskip("fla")
    made, by_token, by_head = _scan_inputs(kind, rows)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows]).cuda()
    rounded = [tensor.bfloat16() for tensor in (*by_token, *by_head)]
    assert linear_attention.fits(rounded[:3])
    monkeypatch.setattr(scan, "KERNEL_SEGMENT_TOKENS", 2048)
    fused = _scanned(made, rounded, len(by_token), positions)
    exact = _scanned(made, [tensor.float() for tensor in rounded], len(by_token), positions)
    monkeypatch.setattr(linear_attention, "fits", lambda mixed: False)
    plain = _scanned(made, rounded, len(by_token), positions)
    errors = [
        [float((mine - expected).norm() / expected.norm()) for mine, expected in zip(each, exact, strict=True)]
        for each in (fused, plain)
    ]
    for index, (mine, other) in enumerate(zip(*errors, strict=True)):
        print(f"{kind} {len(rows)}x{positions.shape[1]} tensor {index}: fused {mine:.2e}, plain {other:.2e}")
    assert all(torch.isfinite(tensor).all() for tensor in fused)
    for mine, other in zip(*errors, strict=True):
        assert mine < max(0.02, 2 * other)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_kernels_keep_documents_apart(kind: str) -> None:
    """Other queries, keys and values before a document change none of its bits. Other decays may, by rounding."""
    pytest.importorskip("fla")
    made, by_token, by_head = _scan_inputs(kind, [[700, 324]])
    positions = torch.cat([torch.arange(700), torch.arange(324)])[None].cuda()
    outs = []
    for factor in (1.0, 30.0):
        changed = [torch.cat([x[:, :700] * factor, x[:, 700:]], dim=1) for x in by_token[:3]] + by_token[3:]
        inputs = [tensor.bfloat16() for tensor in (*changed, *by_head)]
        assert linear_attention.fits(inputs[:3])
        outs.append(
            [tensor[:, 700:] for tensor in _scanned(made, inputs, len(by_token), positions)[: len(by_token) + 1]]
        )
    differences = [float((a - b).abs().max()) for a, b in zip(*outs, strict=True)]
    print(f"{kind} differences of outputs and gradients by what came before: {differences}")
    assert max(differences[:1]) == 0
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2 * float(a.abs().max())) for a, b in zip(*outs, strict=True))


def _seconds(function: Callable[[], object], count: int = 5) -> float:
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(count):
        function()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3 / count


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_kernel_errors_are_printed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla")
    made, by_token, by_head = _scan_inputs(kind, [[16384]])
    inputs = [tensor.bfloat16() for tensor in (*by_token, *by_head)]
    positions = torch.arange(16384, device="cuda")[None]
    for name in ("fused", "plain"):
        if name == "plain":
            monkeypatch.setattr(linear_attention, "fits", lambda mixed: False)
        for part in (2048, 4096, 8192, 16384):
            monkeypatch.setattr(scan, "KERNEL_SEGMENT_TOKENS" if name == "fused" else "SEGMENT_TOKENS", part)
            if name == "plain" and part > 2048:
                break
            _scanned(made, inputs, len(by_token), positions)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            seconds = _seconds(lambda: _scanned(made, inputs, len(by_token), positions))
            peak = (torch.cuda.max_memory_allocated() - before) / 1e9
            print(f"{kind} {name}, parts of {part}: {seconds * 1e3:.1f} ms forward and backward, {peak:.2f} GB")


def _wide(case: Case) -> Case:
    """Widen the heads to the size that attention kernels support."""

    def config() -> object:
        made = case.config()
        made.head_dim = 64
        return made

    return Case(case.name, config)


@pytest.fixture
def plain_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use transformers' recurrences in PyTorch, because fla's kernels, if installed, round to TF32."""
    for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
        plain = inspect.unwrap(module.torch_chunk_gated_delta_rule)
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", plain)


@pytest.mark.gpus(lane="parameters", minutes=6)
@pytest.mark.usefixtures("plain_references")
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
    # In bfloat16 a token near the border between two experts may choose the other one.
    assert error.max() < 1e-3 if dtype == "float32" else error.median() < 0.05 * alone.abs().max()
    got = policy.adapter.to_hf({name: p.grad.full_tensor() for name, p in policy.model.named_parameters()})
    name = "model.embed_tokens.weight"
    mine = got.get(name, got.get("backbone.embeddings.weight"))
    expected = reference.get_input_embeddings().weight.grad
    assert mine is not None and expected is not None
    difference = (mine - expected).norm() / expected.norm()
    assert difference < (1e-3 if dtype == "float32" else 0.3)
