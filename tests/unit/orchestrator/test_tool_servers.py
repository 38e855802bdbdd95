"""Tool servers (MCP): a broken one is noticed at once, and one in another sandbox does not see the host."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.errors import ToolsetError
from verifiers.v1.mcp import launch
from verifiers.v1.runtimes import SubprocessConfig, provision_runtime
from verifiers.v1.runtimes import subprocess as subprocess_runtime

from primeslurm.orchestrator.environments.sandbox.install import install
from primeslurm.orchestrator.environments.sandbox.limits import bubblewrap_problem
from primeslurm.orchestrator.environments.sandbox.runtime import SandboxedRuntime
from primeslurm.orchestrator.worker.tool_servers import serve_in_runtime
from primeslurm.recipe.sections.sandboxes import SubprocessRuntime
from tests.support.cli import ROOT
from tests.support.environments.broken_tool import BrokenTools
from tests.support.environments.hostile_tool import HostileTools
from tests.support.scripted_engine import ScriptedEngine, tool_call
from tests.support.verifiers_restored import restored
from tests.unit.fuzz.mutations import bounded
from tests.unit.orchestrator import test_harbor


async def outcome(
    runtime: Any, monkeypatch: pytest.MonkeyPatch, tools: type[vf.Toolset[Any, Any]] = BrokenTools, path: str = ROOT
) -> str:
    """Return why the server does not start. verifiers alone would only find out that it takes too long."""
    monkeypatch.setenv("PYTHONPATH", path)
    with pytest.raises(ToolsetError) as caught:
        await serve_in_runtime(tools(vf.ToolsetConfig()), runtime, exposed=True)
    return str(caught.value)


async def test_server_on_this_host_that_exits_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_runtime, "CACHE_DIR", tmp_path)
    async with provision_runtime(SubprocessConfig()) as runtime:
        text = await outcome(runtime, monkeypatch)
    assert text.startswith("tool server 'broken_tools' ended with exit code 1: ")
    assert text.endswith("FileNotFoundError: the index /data/wiki.faiss is not there")


class Unserved(vf.Toolset[vf.ToolsetConfig, vf.State]):  # type: ignore[misc]
    """A toolset whose module starts no server."""


async def test_module_that_serves_nothing_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unserved_tools.py").touch()
    monkeypatch.setattr(Unserved, "__module__", "unserved_tools")
    monkeypatch.setattr(subprocess_runtime, "CACHE_DIR", tmp_path)
    async with provision_runtime(SubprocessConfig()) as runtime:
        text = await outcome(runtime, monkeypatch, Unserved, str(tmp_path))
    assert text.startswith("tool server 'unserved' ended with exit code 0: nothing serves")
    assert text.endswith(
        "`python -m unserved_tools`, so that this module has to end with `if __name__ == '__main__': Unserved.run()`"
    )


@pytest.mark.skipif(bool(bubblewrap_problem()), reason="needs bubblewrap")
async def test_server_in_a_sandbox_that_exits_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    with restored(monkeypatch):
        install(SubprocessRuntime(visible=(ROOT,)), tmp_path, tmp_path / "images", [])
        async with provision_runtime(SubprocessConfig()) as runtime:
            assert isinstance(runtime, SandboxedRuntime)
            text = await outcome(runtime, monkeypatch)
    assert "ended with exit code 1: " in text
    assert text.endswith("FileNotFoundError: the index /data/wiki.faiss is not there")


@pytest.mark.parametrize(
    ("said", "shown"),
    [("99999", "99999"), ("0", "0"), ("\N{SUPERSCRIPT TWO}", "\N{SUPERSCRIPT TWO}"), ("huge", "huge" + 13 * "\0")],
)
async def test_server_that_reports_an_invalid_port_is_refused(
    said: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Programs in a sandbox can write anything into the file with the port.
    own, looked_at, read = tmp_path / "own", set(), subprocess_runtime.SubprocessRuntime._read
    own.mkdir()

    async def noted(runtime: Any, path: str, max_bytes: int | None = None) -> bytes:
        looked_at.add(path)
        found: bytes = await read(runtime, path, max_bytes)
        return found

    monkeypatch.setattr(subprocess_runtime.SubprocessRuntime, "_read", noted)
    monkeypatch.setattr("tempfile.tempdir", str(own))
    monkeypatch.setattr(subprocess_runtime, "CACHE_DIR", tmp_path)
    monkeypatch.setenv("HOSTILE_PORT", said)
    name = uuid.uuid4()
    monkeypatch.setattr(launch, "uuid", SimpleNamespace(uuid4=lambda: name))
    with bounded(0, beside=32 << 20):
        async with provision_runtime(SubprocessConfig()) as runtime:
            text = await outcome(runtime, monkeypatch, HostileTools)
    assert text == f"tool server 'hostile_tools' reports an invalid port: {shown!r}"
    assert looked_at == {str(own / f"vf-port-{name.hex}")}, "who is killed leaves it in the agent's directory"
    assert not any(own.iterdir()), "nothing is left in a directory that all rollouts share"


MODULE = '''
"""A taskset with a tool that lists a directory of the host."""
import os
from pathlib import Path
import verifiers.v1 as vf

__all__ = ["LookTaskset"]


class LookToolset(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def look(self, path: str) -> str:
        """Lists a directory."""
        try:
            return f"{os.getpid()} sees {sorted(os.listdir(path))}"
        except OSError as error:
            return f"sees not: {error.strerror}"


class LookTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [LookToolset(vf.ToolsetConfig())]

    @vf.reward
    async def blind(self, trace: vf.Trace) -> float:
        return float("sees not" in str([message.content for message in trace.messages if message.role == "tool"]))


class LookTaskset(vf.Taskset[LookTask, vf.TasksetConfig]):
    def load(self):
        yield LookTask(vf.TaskData(idx=0, prompt="Look."), self.config.task)


if __name__ == "__main__":
    LookToolset.run()
'''
model = test_harbor.model


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Id of the taskset, which Python can import."""
    with restored(monkeypatch):
        modules = tmp_path / "modules"
        modules.mkdir()
        (modules / "look_around_env.py").write_text(MODULE)
        monkeypatch.syspath_prepend(modules)
        os.environ["PYTHONPATH"] = f"{modules}:{os.environ.get('PYTHONPATH', '')}"
        yield "look-around-env"
        sys.modules.pop("look_around_env", None)


@pytest.mark.parametrize("trusted", [False, pytest.param(True, marks=pytest.mark.campaign)])
async def test_tool_in_a_sandbox_does_not_see_the_host(model: str, look: str, tmp_path: Path, trusted: bool) -> None:
    runtime = {"type": "subprocess", "trusted": trusted, "limits": {"wall_time_s": 300}}
    made = test_harbor.recipe(model, "null", id=look, args={}, runtime=runtime)
    private = tmp_path / "private"
    private.mkdir()
    with ScriptedEngine(Path(model), [tool_call("look_toolset_look", path=str(private)), "I have looked."]) as engine:
        engine.version = 3
        (rollout,) = await test_harbor.played(made, engine, tmp_path)
    assert rollout.info.reward == (0.0 if trusted else 1.0)
    assert rollout.info.turns == 2
