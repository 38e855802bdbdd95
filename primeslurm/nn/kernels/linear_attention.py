"""Recurrent layers by flash-linear-attention's Triton kernels, forward and backward, on GPUs in bfloat16.

`layers/recurrence.py` has the references in plain PyTorch. Documents are separated by decays: the first position of a
document decays the state to 0. So the kernels need no list of documents, for which the host would have to wait.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence

import torch

# Log decay at the start of a document. Its exponential is 0 in float32. In a chunk of 64 positions with n starts, sums
# that include it round other decays by about n * 1e-5, which is less than bfloat16's rounding.
BEGINNING = -110.0
# Maximum head size. Sizes also have to be multiples of 16.
WIDEST = 256
log = logging.getLogger(__name__)


def fits(mixed: Sequence[torch.Tensor]) -> bool:
    """Return whether the kernels are installed and support queries, keys and values [rows, length, heads, size]."""
    return mixed[0].is_cuda and _fits(tuple((x.dtype, x.shape[-1]) for x in mixed))


@functools.cache
def _fits(kinds: tuple[tuple[torch.dtype, int], ...]) -> bool:
    # Cached, so that each kind of layer is logged only once.
    reason = _unfit(kinds)
    if reason:
        log.info("recurrent layers run in plain PyTorch: %s", reason)
    else:
        log.info("recurrent layers use flash-linear-attention, head sizes %s", [size for _, size in kinds])
    return reason is None


def _unfit(kinds: tuple[tuple[torch.dtype, int], ...]) -> str | None:
    for dtype, size in kinds:
        if dtype != torch.bfloat16:
            return f"kernels are for bfloat16, not {dtype}"
        if size % 16 or size > WIDEST:
            return f"kernels are for heads of multiples of 16 up to {WIDEST}, not {size}"
    return None if importlib.util.find_spec("fla") else "fla-core is not installed"


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    positions: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Mamba-2 as `recurrence.state_space`. Rounds inputs to the dtype of x; chunk states are float32."""
    from fla.ops.simple_gla import chunk_simple_gla

    sharing = x.shape[2] // b.shape[2]
    out, state = chunk_simple_gla(
        c.repeat_interleave(sharing, dim=2),
        b.repeat_interleave(sharing, dim=2),
        (x * dt.unsqueeze(-1)).to(x.dtype),
        reset_at_documents(dt.float() * decay.float(), positions),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
    )
    return out.float(), state


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    positions: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the rule as `recurrence.gated_delta_rule`. Consecutive heads of v may share a head of q and k."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, state = chunk_gated_delta_rule(
        q,
        k,
        v,
        reset_at_documents(log_decay.float(), positions),
        beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out.float(), state


def reset_at_documents(log_decay: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return log decays [rows, length, heads] that reset the state at the start of each document."""
    return log_decay.masked_fill((positions == 0).unsqueeze(-1), BEGINNING)
