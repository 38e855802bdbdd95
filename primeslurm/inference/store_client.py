"""Starts the Mooncake client of an inference node: `python -m primeslurm.inference.store_client ARGS`."""

# The client is a separate program. Its CUDA build needs libcudart, which NVIDIA's Python packages contain. Other
# programs than torch find it only through LD_LIBRARY_PATH.

from __future__ import annotations

import importlib.util
import os
import runpy
from collections.abc import Iterable, Mapping
from pathlib import Path

_VARIABLE = "LD_LIBRARY_PATH"


def library_path(packages: Iterable[Path], variables: Mapping[str, str]) -> str:
    """Return LD_LIBRARY_PATH with the libraries of NVIDIA's packages appended."""
    libraries = [str(path) for package in packages for path in sorted(package.glob("cu*/lib"))]
    return ":".join([*filter(None, [variables.get(_VARIABLE)]), *libraries])


def main() -> None:
    nvidia = importlib.util.find_spec("nvidia")
    packages = map(Path, nvidia.submodule_search_locations or ()) if nvidia else ()
    os.environ[_VARIABLE] = library_path(packages, os.environ)
    runpy.run_module("mooncake.cli_client", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
