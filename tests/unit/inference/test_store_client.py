"""Mooncake's client is started with a path to CUDA's libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from primeslurm.inference.store_client import library_path


def test_libraries_of_nvidias_packages_come_behind_those_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "cu13" / "lib").mkdir(parents=True)
    (tmp_path / "nccl").mkdir()
    cuda = str(tmp_path / "cu13" / "lib")
    assert library_path([tmp_path], {"LD_LIBRARY_PATH": "/ucx/lib:/x"}) == f"/ucx/lib:/x:{cuda}"
    assert library_path([tmp_path], {}) == cuda
    assert library_path([], {}) == ""


@pytest.mark.parametrize("found", [True, False])
def test_client_gets_arguments_and_library_path(found: bool, tmp_path: Path) -> None:
    """A fake package `mooncake` reports its arguments."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    show = "import os, sys; print(*sys.argv[1:], os.environ['LD_LIBRARY_PATH'])"
    (tmp_path / "mooncake" / "cli_client.py").write_text(show)
    if found:
        (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[3])])]
    env = {**os.environ, "PYTHONPATH": ":".join(paths), "LD_LIBRARY_PATH": "/ucx"}
    argv = [sys.executable, "-m", "primeslurm.inference.store_client", "--host", "h"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[:2] == ["--host", "h"] and words[2].split(":")[0] == "/ucx"
    assert (f"{tmp_path}/nvidia/cu13/lib" in words[2].split(":")) == found
