"""Which FlashAttention varlen attention uses: the newest that is installed and made for this GPU.

On Hopper, FlashAttention 3 and 4 take half as long as the second, which torch contains. vLLM's GPU wheel brings the
fourth, forward and backward; torch 2.13 would take its kernels from a module with the two functions below, but was made
when the forward one returned only outputs and log-sum-exps.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import register_flash_attention_impl

KERNELS = "vllm.vllm_flash_attn.cute.interface"
log = logging.getLogger(__name__)


def best(wanted: Callable[[], str | None], register: Callable[[str], Any]) -> str | None:
    """The name of an implementation for torch's registry, or None for the one that torch contains.

    Args:
        wanted: which is the best for this GPU: None, or "FA3" on Hopper, or "FA4" on what came later.
        register: has torch take FlashAttention 4 from a module of this name.
    """
    if wanted() is None:
        return None
    if wanted() == "FA3" and importlib.util.find_spec("flash_attn_interface"):
        return "FA3"
    try:
        _kernels()
    except ImportError as error:
        log.info("attention by FlashAttention 2: %s", error)
        return None
    register_flash_attention_impl("FA4", register_fn=lambda: register(__name__))
    return "FA4"


def _flash_attn_fwd(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, log_sum_exp, *_ = _kernels()._flash_attn_fwd(*args, **options)
    return out, log_sum_exp


def _flash_attn_bwd(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value, *_ = _kernels()._flash_attn_bwd(*args, **options)
    return query, key, value


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module(KERNELS)
