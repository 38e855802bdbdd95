"""Processes that vLLM spawns for a group of engines: they meet the others before vLLM loads plugins, if it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from primeslurm.inference import guards

OPTION = "--data-parallel-size"
"""Of the command line of an engine that is one of several ranks."""
_vllms: dict[str, Any] = {}
"""vLLM's own functions."""


def use(words: Sequence[str]) -> None:
    """Have those that this process starts load plugins first, if it is one of several ranks.

    Args:
        words: command line of the engine, which multiprocessing gives to all of its processes.

    Raises:
        RuntimeError: vLLM is not the version that this was written for.
    """
    if not any(word.partition("=")[0] == OPTION for word in words):
        return
    from vllm.v1.engine.coordinator import DPCoordinatorProc
    from vllm.v1.engine.core import EngineCoreProc

    _vllms["core"] = guards.expect(EngineCoreProc, "run_engine_core", ["dp_rank"])
    _vllms["coordinator"] = guards.expect(DPCoordinatorProc, "run_coordinator", ["engine_count"])
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Run an engine's core."""
    _load_plugins()
    _vllms["core"](*args, **kwargs)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """Run the coordinator of a group."""
    _load_plugins()
    _vllms["coordinator"](*args, **kwargs)


def _load_plugins() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
