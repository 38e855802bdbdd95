"""Layouts of two GPUs compared with one, and attention kernels with dense attention, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torchtitan.models.common.attention import VarlenMetadata, create_varlen_metadata_for_document

from benchmarks.support.shared_gpu import nccl_version
from primeslurm.nn import compat
from primeslurm.trainer.components import varlen_attention
from primeslurm.trainer.distributed.context_parallel import local_documents
from tests.trainer.families import BY_NAME, write
from tests.trainer.gradients import Layout, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TOLERANCE = {"qwen3": 0.03, "qwen3_moe": 0.15, "gpt_oss": 0.15, "qwen3_5_text": 0.15, "nemotron_h": 0.15}
"""Allowed norm of a gradient's difference, relative to the gradient: bfloat16 has 8 bits, and changes some routes."""
TWO_GPUS = [
    Layout(case, parallelism, "varlen", "bfloat16")
    for case, parallelism in (
        ("qwen3", {}),
        ("qwen3", {"dp_replicate": 2}),
        ("qwen3", {"cp": 2, "cp_style": "ulysses"}),
        ("qwen3", {"cp": 2, "cp_style": "allgather"}),
        ("qwen3", {"cp": 2, "activation_checkpointing": "selective"}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"ep": 2}),
        ("qwen3_moe", {"ep": 2, "cp": 2, "activation_checkpointing": "full"}),
        ("gpt_oss", {"cp": 2}),
        ("qwen3_5_text", {"cp": 2}),
        ("nemotron_h", {"ep": 2, "cp": 2}),
    )
]
FOUR_RANKS = [
    Layout(case, parallelism, "varlen", "bfloat16")
    for case, parallelism in (
        ("qwen3", {"cp": 4, "cp_style": "ulysses"}),
        ("qwen3", {"cp": 4, "cp_style": "allgather"}),
        ("qwen3", {"dp_replicate": 2, "cp": 2}),
        ("qwen3_moe", {"ep": 4}),
        ("qwen3_moe", {"ep": 4, "cp": 4, "activation_checkpointing": "full"}),
        ("qwen3_moe", {"ep": 2, "cp": 2, "dp_replicate": 2}),
        ("gpt_oss", {"cp": 4, "cp_style": "allgather"}),
        ("qwen3_5_text", {"cp": 4}),
        ("nemotron_h", {"ep": 4, "cp": 4}),
    )
]
FLEX_TWO_GPUS = [
    Layout("qwen3", {"cp": 2, "cp_style": style}, "flex", "bfloat16") for style in ("ulysses", "allgather")
]


each_case = pytest.mark.parametrize("case", TOLERANCE, scope="module")


@pytest.fixture(scope="module")
def models(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a case's model, and its gradients on one GPU with varlen attention."""
    directory = tmp_path_factory.mktemp("gradients")
    write(BY_NAME[case], directory / case)
    compare(1, [Layout(case, attention="varlen", dtype="bfloat16")], directory, "--write")
    return directory


def gpus_for(ranks: int) -> bool:
    """Return whether each rank can have a GPU, possibly a shared one."""
    gpus = torch.cuda.device_count()
    return gpus >= ranks or (gpus > 0 and nccl_version() >= (2, 30))


def check(size: int, layouts: list[Layout], case: str, models: Path) -> None:
    """Fail with all layouts of a case that differ too much from one GPU."""
    mine = [layout for layout in layouts if layout.case == case]
    actual = list(zip(mine, compare(size, mine, models), strict=True))
    print("\n".join(f"{difference:.4f} {layout}" for layout, difference in actual))
    assert not [(str(layout), difference) for layout, difference in actual if difference > TOLERANCE[case]]


@pytest.mark.gpus(lane="parameters", minutes=5)
@pytest.mark.parametrize("case", ["qwen3", "gpt_oss"], scope="module")
def test_flex_equals_varlen(case: str, models: Path) -> None:
    check(1, [Layout(case, attention="flex", dtype="bfloat16")], case, models)


@each_case
@pytest.mark.gpus(2, lane="parameters", minutes=6)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one(case: str, models: Path) -> None:
    check(2, TWO_GPUS, case, models)


@each_case
@pytest.mark.gpus(4, 3, lane="parameters", minutes=7)
@pytest.mark.skipif(not gpus_for(4), reason="needs four GPUs, or NCCL 2.30, which takes a GPU twice")
def test_four_ranks_equal_one(case: str, models: Path) -> None:
    """On four GPUs, or on fewer shared ones."""
    check(4, FOUR_RANKS, case, models)


@pytest.mark.gpus(2, lane="parameters", minutes=5)
@pytest.mark.parametrize("case", ["qwen3"], scope="module")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_with_flex_equal_one(case: str, models: Path) -> None:
    check(2, FLEX_TWO_GPUS, case, models)


@pytest.fixture
def newest() -> None:
    """Return the attention kernels that models use on this GPU."""
    wanted = compat.titan_utils.get_cuda_flash_attention_impl()
    if wanted is not None and current_flash_attention_impl() != wanted:
        activate_flash_attention_impl(wanted)


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("window", [(-1, 0), (40, 0)])
@pytest.mark.parametrize(
    ("size", "value_size", "kv_heads"), [(64, 64, 2), (192, 128, 8), (192, 128, 2), (256, 256, 2), (48, 32, 8)]
)
@pytest.mark.parametrize("rank", [None, 0, 2])
def test_the_kernel_equals_dense_attention(
    rank: int | None, size: int, value_size: int, kv_heads: int, window: tuple[int, int]
) -> None:
    if torch.cuda.get_device_capability()[0] == 9:
        assert current_flash_attention_impl() in ("FA3", "FA4")
    lengths = (100, 28, 256)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
    documents: VarlenMetadata = create_varlen_metadata_for_document(positions)
    queries = keys = sum(lengths)
    if rank is not None:
        local = local_documents(documents, keys, rank, 4)
        documents, queries, (first, end) = local.metadata, keys // 4, local.keys[0]
        keys = end - first
    torch.manual_seed(0)
    shapes = ((queries, 8, size), (keys, kv_heads, size), (keys, kv_heads, value_size))
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    out, lse = varlen_attention.flash(*tensors, documents, None, window)
    expected, expected_lse = varlen_attention.dense(*exact, documents, None, window)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.float(), expected_lse, atol=2e-2, rtol=2e-2)
    weights = torch.randn_like(expected)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(tensors, exact, strict=True):
        assert mine.grad is not None and other.grad is not None
        difference = torch.linalg.vector_norm(mine.grad.float() - other.grad)
        assert difference < 0.02 * torch.linalg.vector_norm(other.grad)
