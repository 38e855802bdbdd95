"""Layers, kernels and checkpoint adapters that the model families share, on top of torchtitan.

`compat` has to patch torch and torchtitan before any module of torchtitan is imported. This package installs an import
hook: importing torchtitan imports `compat` before anything else of torchtitan. The package itself imports no torch, so
that the planner can read `block_sizes` and `expert_splits`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _CompatFirst(MetaPathFinder):
    """Import hook that runs `compat` before torchtitan. This works because torchtitan's top package imports nothing."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Find torchtitan as usual, but let its import execute `compat` first. None for all other modules."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "torchtitan" else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(original: Any, module: ModuleType) -> None:
    original(module)
    importlib.import_module("primeslurm.nn.compat")


if "torchtitan" not in sys.modules:
    sys.meta_path.insert(0, _CompatFirst())
