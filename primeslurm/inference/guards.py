"""Checks that vLLM's code is as a patch expects it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def expect(owner: type | ModuleType, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Return the method or function `name` of `owner`. Raise RuntimeError unless it has these parameters."""
    method: Callable[..., Any] | None = getattr(owner, name, None)
    if method is None:
        raise changed(f"{owner.__name__}.{name} is missing")
    missing = [p for p in parameters if p not in inspect.signature(method).parameters]
    if missing:
        raise changed(f"{owner.__name__}.{name} has no parameter {', '.join(missing)}")
    return method


def changed(difference: str) -> RuntimeError:
    """Return the error for vLLM code that differs from what a patch expects."""
    import vllm

    where = "primeslurm/inference and primeslurm/testbed/cpu_engine"
    return RuntimeError(f"vLLM {vllm.__version__}: {difference}. primeslurm patches vLLM 0.32; see {where}")
