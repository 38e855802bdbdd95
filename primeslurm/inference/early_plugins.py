"""Loads plugins early in the processes that vLLM spawns for data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from primeslurm.inference import guards

# Option of an engine that is one of several data-parallel ranks.
OPTION = "--data-parallel-size"
# vLLM's own functions.
_originals: dict[str, Any] = {}


def use(argv: Sequence[str]) -> None:
    """Patch vLLM's processes if `argv` belongs to a data-parallel rank. Raise RuntimeError if vLLM has changed."""
    # These processes connect to each other before vLLM loads plugins, or without loading them. Their sockets and stores
    # would not be protected.
    if not any(word.partition("=")[0] == OPTION for word in argv):
        return
    from vllm.v1.engine.coordinator import DPCoordinatorProc
    from vllm.v1.engine.core import EngineCoreProc

    _originals["core"] = guards.expect(EngineCoreProc, "run_engine_core", ["dp_rank"])
    _originals["coordinator"] = guards.expect(DPCoordinatorProc, "run_coordinator", ["engine_count"])
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    _load_plugins()
    _originals["core"](*args, **kwargs)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    _load_plugins()
    _originals["coordinator"](*args, **kwargs)


def _load_plugins() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
