"""Tool servers that end before they listen: found at once, wherever they run, with their last words."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.errors import ToolsetError
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig, provision_runtime
from verifiers.v1.runtimes import subprocess as subprocess_runtime

from primeslurm.orchestrator.rollouts.tool_servers import serve_in_runtime
from tests.support.cli import ROOT
from tests.support.environments.broken_tool import BrokenTools

LONG_S = 120.0
"""verifiers alone takes 180 s to find out."""


async def outcome(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    began = time.monotonic()
    with pytest.raises(ToolsetError) as caught:
        await serve_in_runtime(BrokenTools(vf.ToolsetConfig()), runtime, exposed=True)
    return str(caught.value), time.monotonic() - began


async def test_a_server_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_runtime, "CACHE_DIR", tmp_path)
    async with provision_runtime(SubprocessConfig()) as runtime:
        text, seconds = await outcome(runtime, monkeypatch)
    assert text.startswith("tool server 'broken_tools' ended with exit code 1: ")
    assert text.endswith("FileNotFoundError: the index /data/wiki.faiss is not there")
    assert seconds < LONG_S


class Elsewhere:
    """A runtime that keeps no process: what it starts is known by its files alone."""

    type = "subprocess"
    user = None
    published_port = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.info = type("Info", (), {"id": str(directory)})()

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start it and forget it."""
        script = '"$@" > "$0" 2>&1 &'
        await (await asyncio.create_subprocess_exec("sh", "-c", script, log, *argv, cwd=self.directory)).wait()

    async def read(self, path: str) -> bytes:
        """Read a file."""
        return (self.directory / path).read_bytes()

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run to the end."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, cwd=self.directory, stdout=pipe, stderr=pipe)
        out, err = await process.communicate()
        return ProgramResult(exit_code=process.returncode or 0, stdout=out.decode(), stderr=err.decode())


async def test_a_server_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, seconds = await outcome(Elsewhere(tmp_path), monkeypatch)
    assert "ended with exit code 1: " in text and "the index /data/wiki.faiss is not there" in text
    assert seconds < LONG_S
