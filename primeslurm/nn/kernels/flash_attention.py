"""Selection of the newest installed FlashAttention that supports this GPU.

On Hopper, FlashAttention 3 and 4 take half as long as FlashAttention 2, which torch contains. vLLM's GPU wheel includes
FlashAttention 4.
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
    """Return the name of an implementation in torch's registry. None means FlashAttention 2 of torch.

    `wanted` returns the best one for this GPU: None, "FA3" (Hopper) or "FA4" (later). `register` registers
    FlashAttention 4.
    """
    if wanted() is None:
        return None
    if wanted() == "FA3" and importlib.util.find_spec("flash_attn_interface"):
        return "FA3"
    try:
        _kernels()
    except ImportError as error:
        log.info("attention uses FlashAttention 2: %s", error)
        return None
    register_flash_attention_impl("FA4", register_fn=lambda: register(__name__))
    return "FA4"


# torch 2.13 takes its kernels from a module with these two functions, but expects an older version of them that returns
# fewer values.
def _flash_attn_fwd(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, log_sum_exp, *_ = _kernels()._flash_attn_fwd(*args, **options)
    return out, log_sum_exp


def _flash_attn_bwd(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value, *_ = _kernels()._flash_attn_bwd(*args, **options)
    return query, key, value


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module(KERNELS)
