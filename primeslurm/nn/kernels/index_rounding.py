"""How vLLM's engines round the queries and keys of DSA's indexer, whatever the model's dtype is.

A trainer that rounds alike selects the keys that its engines selected.
"""

from __future__ import annotations

import torch

from primeslurm.nn.kernels.fp8.blocks import LARGEST

SMALLEST_AMAX = 1e-4
"""No row counts as smaller, as in vLLM's kernel for the keys."""


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [..., size]: e4m3 of that shape and float32 scales [...], powers of two (vLLM's `ue8m0`)."""
    scales = rows.abs().amax(-1).float().clamp_min(SMALLEST_AMAX).div(LARGEST).log2().ceil().exp2()
    return (rows.float() / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """What rounded rows stand for, exact in bfloat16."""
    data, scales = quantize(rows)
    return (data.float() * scales.unsqueeze(-1)).to(rows.dtype)
