"""Fusion of chains of elementwise operations with torch.compile, on GPUs in bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch

Inputs = ParamSpec("Inputs")


def fits(x: torch.Tensor) -> bool:
    """Return whether to fuse chains over tensors like x. False within compiled layers, which fuse them anyway."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not torch.compiler.is_compiling()


@functools.cache
def fused(function: Callable[Inputs, torch.Tensor]) -> Callable[Inputs, torch.Tensor]:
    """Compile a module-level function of tensors once for all lengths. All callers share the compiled code."""
    return torch.compile(function, dynamic=True)
