"""Chains of elementwise operations as one kernel each, by torch.compile, on GPUs in bfloat16.

Operation by operation, such a chain reads and writes whole activations many times, and a short part of a row costs more
to launch than to compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch

Inputs = ParamSpec("Inputs")


def fits(x: torch.Tensor) -> bool:
    """Tell whether chains over tensors like this one are fused here. In layers that are compiled whole they are anyway.

    Args:
        x: of any shape.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and not torch.compiler.is_compiling()


@functools.cache
def fused(function: Callable[Inputs, torch.Tensor]) -> Callable[Inputs, torch.Tensor]:
    """Compile a function of tensors once for all lengths: rows of other lengths compile nothing anew.

    Args:
        function: without side effects, of a module, not of an object: the compiled code is that of all its callers.
    """
    return torch.compile(function, dynamic=True)
