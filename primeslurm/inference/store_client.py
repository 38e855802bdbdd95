"""Start the Mooncake client of an inference node: `python -m primeslurm.inference.store_client ARGS`.

The client is a program of its own. Its build for CUDA needs libcudart, which torch's packages bring and torch loads by
itself. The loader finds it for other programs on LD_LIBRARY_PATH only.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
from collections.abc import Iterable, Mapping
from pathlib import Path

_VARIABLE = "LD_LIBRARY_PATH"


def library_path(packages: Iterable[Path], variables: Mapping[str, str]) -> str:
    """Return LD_LIBRARY_PATH with the libraries of NVIDIA's packages behind what it names already."""
    libraries = [str(path) for package in packages for path in sorted(package.glob("cu*/lib"))]
    return ":".join([*filter(None, [variables.get(_VARIABLE)]), *libraries])


def main() -> None:
    """Replace this process by the client."""
    nvidia = importlib.util.find_spec("nvidia")
    packages = map(Path, nvidia.submodule_search_locations or ()) if nvidia else ()
    os.environ[_VARIABLE] = library_path(packages, os.environ)
    runpy.run_module("mooncake.cli_client", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
