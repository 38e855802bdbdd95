"""The machine and the library versions of a result."""

from __future__ import annotations

import os
from importlib.metadata import version


def machine() -> str:
    """Return the names of this machine's GPUs, or else the number of CPU cores and their load."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, one host"
    return f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}"


def versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}
