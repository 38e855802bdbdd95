"""The torchtitan trainer: models, parallelism, loss, checkpoints, weight transfer, the RL and SFT loops.

`compat` has to patch torch and torchtitan before any module of torchtitan is imported. This package sees to it,
whatever is imported first: importing torchtitan imports `compat` before anything else of torchtitan. Until then the
package imports nothing, so that `__main__` can choose the device and block signals before torch is there.
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
    """Finds torchtitan as ever, and has its top package (which imports nothing) import `compat` when it is loaded."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """See MetaPathFinder."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "torchtitan" else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(original: Any, module: ModuleType) -> None:
    original(module)
    importlib.import_module("primeslurm.nn.compat")


if "torchtitan" in sys.modules:
    raise ImportError("primeslurm.trainer has to be imported before torchtitan")
sys.meta_path.insert(0, _CompatFirst())
