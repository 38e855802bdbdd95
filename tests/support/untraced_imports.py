"""A coverage plugin that imports unmeasured modules without tracing.

Coverage traces each call and line of unmeasured modules, too, only to discard them. This makes imports of torch, vLLM
and verifiers half as long again, in every process that tests start.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MEASURED = "primeslurm"
_waiting = threading.local()
"""Per thread `trace`: the trace function to restore, while the thread is not traced."""


class _LoaderThatTraces(Loader):
    """Executes a module with a given trace function (None: not traced), and leaves everything else to `loader`."""

    def __init__(self, loader: Any, trace: Callable[..., Any] | None) -> None:
        self._loader = loader
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        before, waiting = sys.gettrace(), getattr(_waiting, "trace", None)
        _waiting.trace = before if self._trace is None else None
        sys.settrace(self._trace)
        try:
            self._loader.exec_module(module)
        finally:
            sys.settrace(before)
            _waiting.trace = waiting


class UntracedFinder:
    """Wraps the other finders, so that measured modules are executed with tracing and all others without it."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module whose tracing must change; None for all others."""
        trace, waiting = sys.gettrace(), getattr(_waiting, "trace", None)
        wanted = trace or waiting if name.partition(".")[0] == MEASURED else None
        if wanted is trace:
            return None
        for finder in sys.meta_path:
            if finder is cls or (spec := finder.find_spec(name, path, target)) is None:
                continue
            if hasattr(spec.loader, "exec_module"):
                spec.loader = _LoaderThatTraces(spec.loader, wanted)
            return spec
        return None


def coverage_init(registry: Any, options: Any) -> None:
    sys.meta_path.insert(0, UntracedFinder)
