"""DeepGEMM's kernels for block-scaled FP8 on SM90, from the package deep_gemm or from the copy in vLLM."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from primeslurm.nn.kernels.fp8.blocks import Groups, Quantized

# Recipe of `outer`: both operands have blocks of 1 x 128 along the summed dimension.
_OUTER = (1, 1, 128)


def _installed() -> ModuleType | None:
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


@functools.cache
def index_library() -> ModuleType | None:
    """Return DeepGEMM if it has the indexer's scores for this GPU, or None."""
    library = _installed() if torch.cuda.get_device_capability()[0] == 9 else None
    return library if hasattr(library, "fp8_fp4_mqa_logits") else None


class DeepGemm:
    """The `backend.Backend` of Hopper GPUs, in bfloat16. Raises ValueError on other GPUs and without DeepGEMM."""

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        if major != 9:
            # Blackwell's kernels need power-of-two scales and other layouts.
            raise ValueError(f"trainer.fp8 needs an SM90 GPU, and this one is SM{major}{minor}")
        library = _installed()
        if library is None:
            raise ValueError(
                "trainer.fp8 needs DeepGEMM: install vLLM's GPU wheel, which contains it, or deep_gemm itself"
            )
        self._library = library

    def product(self, a: Quantized, b: Quantized) -> torch.Tensor:
        result = a.data.new_empty(a.data.shape[0], b.data.shape[0], dtype=torch.bfloat16)
        self._library.fp8_gemm_nt(_pair(a), _pair(b), result)
        return result

    def grouped_product(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        result = a.data.new_empty(a.data.shape[0], b.data.shape[1], dtype=torch.bfloat16)
        self._library.m_grouped_fp8_gemm_nt_contiguous(_pair(a), _pair(b), result, groups.owners)
        return result

    def outer(self, a: Quantized, b: Quantized) -> torch.Tensor:
        result = a.data.new_zeros(a.data.shape[0], b.data.shape[0], dtype=torch.float32)
        # For float32 results, the kernel only supports accumulation.
        self._library.fp8_gemm_nt(_pair(a), _pair(b), result, c=result, recipe=_OUTER)
        return result

    def grouped_outer(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        result = a.data.new_zeros(len(groups.sizes), len(a.scales), len(b.scales), dtype=torch.float32)
        sizes = groups.sizes, groups.bounds.diff()
        self._library.k_grouped_fp8_gemm_nt_contiguous(_pair(a), _pair(b), result, *sizes, result, recipe=_OUTER)
        return result


def _pair(matrix: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    return matrix.data, matrix.scales
