"""What a result is of: the machine, and the versions of what was measured on it."""

from __future__ import annotations

import os
from importlib.metadata import version


def machine() -> str:
    """Name this machine's GPUs, or, without any, its processor cores and how busy these are."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, one host"
    return f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}"


def versions(*packages: str) -> dict[str, str]:
    """Return the installed version of each package."""
    return {package: version(package) for package in packages}
