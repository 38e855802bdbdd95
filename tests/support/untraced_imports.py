"""A plugin of coverage: what is not measured is imported without being traced.

Coverage looks at each call and line of modules that it does not measure, too, only to leave them out. Importing torch,
vLLM or verifiers so takes half as long again, in every process that tests start.
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
"""Of each thread `trace`: what traces it again, while it is not traced."""


class _LoaderThatTraces(Loader):
    """Runs a module with a trace of its own; the module has its loader from then on.

    Args:
        loader: which does all else.
        trace: None: nothing is traced.
    """

    def __init__(self, loader: Any, trace: Callable[..., Any] | None) -> None:
        self._loader = loader
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Have the loader create the module."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Have the loader run the module."""
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
    """Finds what others find. Modules that are measured are run traced, all others untraced."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is to be traced and is not, or the other way round; others find the rest."""
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
    """Be used by coverage, as soon as it starts."""
    sys.meta_path.insert(0, UntracedFinder)
