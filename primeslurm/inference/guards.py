"""A fix of vLLM is applied only to the vLLM it was written for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def expect(owner: type | ModuleType, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Return a method or function of vLLM that a fix replaces.

    Args:
        owner: its class or module.
        name: its name.
        parameters: those that it must take.

    Raises:
        RuntimeError: vLLM has changed there.
    """
    method: Callable[..., Any] | None = getattr(owner, name, None)
    if method is None:
        raise changed(f"{owner.__name__}.{name} is gone")
    missing = [p for p in parameters if p not in inspect.signature(method).parameters]
    if missing:
        raise changed(f"{owner.__name__}.{name} takes no {', '.join(missing)} any more")
    return method


def changed(what: str) -> RuntimeError:
    """Make the error that says what is not as it was."""
    import vllm

    where = "primeslurm/inference/, its cpu/ and weight_transfer/layerwise.py"
    return RuntimeError(f"vLLM {vllm.__version__}: {what}. primeslurm fixes vLLM 0.32; see {where}")
