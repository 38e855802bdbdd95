"""Rounding of the indexer's queries and keys as in vLLM's engines, so that the trainer selects the same keys."""

from __future__ import annotations

import torch

from primeslurm.nn.kernels.fp8.blocks import LARGEST

# Lower limit of a row's maximum, as in vLLM's kernel for the keys
SMALLEST_AMAX = 1e-4


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [..., size] to e4m3 values and float32 scales [...] that are powers of two (`ue8m0` of vLLM)."""
    scales = rows.abs().amax(-1).float().clamp_min(SMALLEST_AMAX).div(LARGEST).log2().ceil().exp2()
    return (rows.float() / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Round rows [..., size] to FP8 and convert them back. bfloat16 holds the result exactly."""
    data, scales = quantize(rows)
    return (data.float() * scales.unsqueeze(-1)).to(rows.dtype)
