"""A rollout whose agent calls a tool server (MCP) in another sandbox."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.testbed.fakes.scripted_engine import ScriptedEngine, tool_call
from tests.support.verifiers_restored import restored
from tests.unit.orchestrator import test_harbor

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


@pytest.mark.parametrize("trusted", [False, True])
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
