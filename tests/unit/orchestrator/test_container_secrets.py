"""Values of secrets reach a container's commands, and no command line, which all users of the node can read."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ApptainerConfig, DockerConfig, PodmanConfig, make_runtime

from primeslurm.orchestrator.environments.sandbox import containers
from tests.support.verifiers_restored import restored

SECRET = "a 'quoted' one\nof two $LINES"
STAND_IN = (
    f"#!{sys.executable} -IS"
    + '''
"""A stand-in for docker, podman and apptainer: no container starts, and commands run here with what is told alone."""
import json, os, pathlib, sys
words = sys.argv[1:]
with (pathlib.Path(__file__).parent / "asked").open("a") as asked:
    print(json.dumps(sys.argv), file=asked)
if words[0] == "exec":
    (at,) = [index for index, word in enumerate(words) if word.startswith(("vf-", "instance://vf-"))]
    options, command = words[:at], words[at + 1 :]
    told = [word for option, word in zip(options, options[1:]) if option == "--env"]
    env = {"PATH": os.environ["PATH"]}
    env |= {word: os.environ[word] for word in told if "=" not in word}
    env |= dict(word.split("=", 1) for word in told if "=" in word)
    if "--env-file" in options:
        file = options[options.index("--env-file") + 1]
        command = ["sh", "-c", 'set -a; . "$0"; exec "$@"', file, *command]
    os.execvpe(command[0], command, env)
sys.exit(words[0] == "run")
'''
)


@pytest.mark.parametrize("config", [DockerConfig(), PodmanConfig(), ApptainerConfig()], ids=lambda config: config.type)
async def test_a_secret_is_in_no_command_line(
    config: DockerConfig | PodmanConfig | ApptainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / config.type
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("LEVEL", "the worker's")
    with restored(monkeypatch):
        containers.mark("tasks-0")
        runtime = make_runtime(config)
    runtime.env = {"TOKEN": SECRET}
    if config.type == "apptainer":
        runtime._dir = tmp_path
    else:
        with pytest.raises(SandboxError, match="run failed"):
            await runtime.start()
    for _ in range(2):
        result = await runtime.run(["sh", "-c", 'echo "$LEVEL: $TOKEN"'], {"LEVEL": "the program's"})
        assert result.stdout == f"the program's: {SECRET}\n"
    asked = (tmp_path / "asked").read_text()
    assert "quoted" not in asked and "two $LINES" not in asked
    assert "LEVEL=the program's" in json.loads(asked.splitlines()[-1])
    for file in tmp_path.glob("*.env"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(list(tmp_path.glob("*.env"))) == (config.type == "apptainer"), "one for each set of variables"
