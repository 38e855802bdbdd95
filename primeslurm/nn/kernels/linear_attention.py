"""Recurrences by flash-linear-attention's Triton kernels, forward and backward, on GPUs in bfloat16.

Their plain references are in `layers/recurrence.py`. Documents are kept apart as decays: what a document's first
position sees of the state is 0. So rows need no list of documents, which the host would have to wait for.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence

import torch

BEGINNING = -110.0
"""The log decay where a document begins: its exponential is 0 in float32. In the chunk of 64 positions where n of them
begin, sums with it round decays by some n * 1e-5, at most as bfloat16 rounds."""
WIDEST = 256
"""Keys and values that the kernels take, and multiples of 16."""
log = logging.getLogger(__name__)


def fits(mixed: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take these queries, keys and values, [rows, length, heads, size], and are installed.

    The compiler does not see into them, so recurrent layers are not compiled (`components.compiled`).
    """
    return mixed[0].is_cuda and _fits(tuple((x.dtype, x.shape[-1]) for x in mixed))


@functools.cache
def _fits(kinds: tuple[tuple[torch.dtype, int], ...]) -> bool:
    """Decide and log once for each kind of layer."""
    reason = _unfit(kinds)
    if reason:
        log.info("recurrent layers in plain PyTorch: %s", reason)
    else:
        log.info("recurrent layers by flash-linear-attention, heads of %s", [size for _, size in kinds])
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
    """As `recurrence.state_space`; inputs are rounded to the dtype of x, states are float32 between parts."""
    from fla.ops.simple_gla import chunk_simple_gla

    sharing = x.shape[2] // b.shape[2]
    out, state = chunk_simple_gla(
        c.repeat_interleave(sharing, dim=2),
        b.repeat_interleave(sharing, dim=2),
        (x * dt.unsqueeze(-1)).to(x.dtype),
        apart(dt.float() * decay.float(), positions),
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
    """As `recurrence.gated_delta_rule`, but consecutive heads of v may share one of q and k."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, state = chunk_gated_delta_rule(
        q,
        k,
        v,
        apart(log_decay.float(), positions),
        beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out.float(), state


def apart(log_decay: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Log decays, [rows, length, heads], after which nothing is left of the document before."""
    return log_decay.masked_fill((positions == 0).unsqueeze(-1), BEGINNING)
