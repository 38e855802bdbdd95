"""Latent attention on a GPU in bfloat16, dense and sparse, compared with the CPU in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GlmMoeDsaConfig

from benchmarks.support.ports import free_port
from benchmarks.support.servers import rank_environment
from primeslurm.nn.kernels.index_rounding import rounded
from primeslurm.nn.kernels.sparse_mla import dense_mla, sparse_mla
from primeslurm.nn.layers import sparse_attention
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import World, join
from tests.trainer.conftest import SEQ_LEN, make_recipe
from tests.trainer.families import DSA, GROUPS, MLA, MLA_YARN, SHARED, Case, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(memory_gb=12),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

QUERIES, KEYS, RANK, ROPE, TOP_K = 256, 2048, 512, 64, 512
SCALE = (128 + ROPE) ** -0.5
DENSE = {"first_k_dense_replace": 4}


@pytest.mark.parametrize(
    ("heads", "buffer_bytes"), [(16, 2**32), (16, 2**26), (64, 2**32)], ids=["at once", "in parts", "FlashMLA"]
)
def test_forward_and_backward_equal_float32(heads: int, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primeslurm.nn.kernels.sparse_mla_backward.BUFFER_BYTES", buffer_bytes)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, QUERIES, heads, RANK + ROPE), (1, KEYS, RANK + ROPE))
    rounded = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    indices = torch.rand(1, QUERIES, KEYS, generator=generator).topk(TOP_K).indices.int()
    indices[..., TOP_K // 2 :].masked_fill_(torch.rand(1, QUERIES, TOP_K // 2, generator=generator) < 0.5, -1)
    weight = torch.randn(1, QUERIES, heads, RANK, generator=generator)

    exact = [tensor.float().requires_grad_() for tensor in rounded]
    expected = dense_mla(*exact, indices, RANK, SCALE)
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    tensors = [tensor.cuda().requires_grad_() for tensor in rounded]
    out = sparse_mla(*tensors, indices.cuda(), RANK, SCALE)
    product = (out.float() * weight.cuda()).sum()
    gradients = torch.autograd.grad(product, tensors, retain_graph=True)
    assert out.dtype == torch.bfloat16
    again = torch.autograd.grad(product, tensors)
    assert all(torch.equal(first, second) for first, second in zip(gradients, again, strict=True))
    for mine, reference in zip((out, *gradients), (expected, *wanted), strict=True):
        error = (mine.float().cpu() - reference).norm() / reference.norm()
        assert error < 0.02, f"{float(error):.4f}"


def test_selected_keys_equal_those_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    length, heads, width, top_k = 1024, 32, 128, 64
    query = torch.randn(1, length, heads, width, generator=generator).bfloat16()
    keys = torch.randn(1, length, width, generator=generator).bfloat16()
    weight = torch.randn(1, length, heads, generator=generator)
    context = sparse_attention.Context.of(torch.cat([torch.arange(600), torch.arange(424)])[None])
    expected = sparse_attention.select(rounded(query).float(), rounded(keys).float(), weight, context, top_k)
    moved = sparse_attention.Context(context.first.cuda(), context.last.cuda())
    actual = sparse_attention.select(query.cuda(), keys.cuda(), weight.cuda(), moved, top_k).cpu()
    assert torch.equal((actual >= 0).sum(-1), (expected >= 0).sum(-1))
    same = [len(set(a) & set(b)) / len(set(b)) for a, b in zip(actual[0].tolist(), expected[0].tolist(), strict=True)]
    assert min(same) > 0.9 and sum(same) / length > 0.999  # products are exact, the order of sums is not


def test_deep_gemm_scores_equal_the_triton_kernels() -> None:
    from primeslurm.nn.kernels.index_kernel import index_scores, triton_scores

    generator = torch.Generator().manual_seed(0)
    query = torch.randn(300, 32, 128, generator=generator).bfloat16().cuda()
    keys = torch.randn(1000, 128, generator=generator).bfloat16().cuda()
    weight = torch.randn(300, 32, generator=generator).cuda()
    last = torch.arange(700, 1000).cuda()
    first = last - torch.randint(0, 700, (300,), generator=generator).cuda()
    actual = index_scores(query, keys, weight, first, last)
    assert actual.is_contiguous() and actual[:, len(keys) :].isneginf().all()
    actual = actual[:, : len(keys)]
    expected = triton_scores(rounded(query), rounded(keys), weight, first, last)
    assert torch.equal(actual.isinf(), expected.isinf())
    error, size = ((tensor.nan_to_num(neginf=0)).norm() for tensor in (actual - expected, expected))
    assert error / size < 5e-4, float(error / size)  # FP8 products accumulate with fewer bits on Hopper


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Return this process as the only rank of a trainer."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank_environment(0, 1, free_port()).items():
            patch.setenv(name, value)
        joined = join(Interrupt(), timeout_s=60)
        yield joined
        joined.close()


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        # without experts, because rounding changes a tiny model's routes and so all later layers
        (Case("deepseek_v3", lambda: DeepseekV3Config(**MLA | DENSE, **GROUPS, rope_parameters=MLA_YARN)), 0.03),
        (Case("all keys", lambda: GlmMoeDsaConfig(**DSA | DENSE, index_topk=64)), 0.03),
        # The same happens to keys.
        (Case("some keys", lambda: GlmMoeDsaConfig(**DSA | DENSE, index_topk=16, indexer_types=SHARED)), 0.1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_bfloat16_logits_are_near_those_of_transformers(
    case: Case, tolerance: float, world: World, tmp_path: Path
) -> None:
    path = write(case, tmp_path)
    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ_LEN)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits
    policy = build(make_recipe(path, model={"path": str(path), "dtype": "bfloat16"}), world)
    logits = policy.logits(tokens.to(world.device), positions.to(world.device))[0]
    logits.float().square().mean().backward()
    assert all(p.grad is not None for p in policy.model.parameters() if p.requires_grad)
    error = (logits.detach().float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < tolerance, f"{float(error.median()):.4f}"
