"""Command lines of docker, podman and apptainer: they hold no secrets, and show containers the right directories."""

from __future__ import annotations

import ast
import itertools
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ApptainerConfig, DockerConfig, PodmanConfig, Runtime, make_runtime

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments.sandbox import containers, uv_scripts
from primeslurm.recipe.sections.sandboxes import Limits
from tests.support.fake_programs import put_on_path
from tests.support.verifiers_restored import restored

SECRET = "a 'quoted' one\nof two $LINES"
FAKE = (
    f"#!{sys.executable} -IS"
    + '''
"""A fake docker, podman and apptainer. Commands run on the host, with the variables that the options pass."""
import json, os, pathlib, sys
words = sys.argv[1:]
with (pathlib.Path(__file__).parent / "asked").open("a") as log:
    print(json.dumps(sys.argv), file=log)
if words[0] == "exec":
    (at,) = [index for index, word in enumerate(words) if word.startswith(("vf-", "instance://vf-"))]
    options, command = words[:at], words[at + 1 :]
    passed = [word for option, word in zip(options, options[1:]) if option == "--env"]
    env = {"PATH": os.environ["PATH"]}
    env |= {word: os.environ[word] for word in passed if "=" not in word}
    env |= dict(word.split("=", 1) for word in passed if "=" in word)
    if "--env-file" in options:
        file = options[options.index("--env-file") + 1]
        command = ["sh", "-c", 'set -a; . "$0"; exec "$@"', file, *command]
    os.execvpe(command[0], command, env)
sys.exit(words[0] == "run")
'''
)


Config = DockerConfig | PodmanConfig | ApptainerConfig
each_engine = pytest.mark.parametrize(
    "config", [DockerConfig(), PodmanConfig(), ApptainerConfig()], ids=lambda config: config.type
)


@pytest.fixture
def _verifiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with restored(monkeypatch):
        yield


@pytest.fixture
def _fake_engine(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _verifiers: None) -> None:
    put_on_path(monkeypatch, tmp_path, FAKE, config.type)
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("LEVEL", "the worker's")
    monkeypatch.delenv("APPTAINER_BIND", raising=False)
    monkeypatch.setattr(containers, "_secret_names", {"TOKEN"})


async def started(config: Config, tmp_path: Path, env: dict[str, str], shown: tuple[Path, ...] = ()) -> Runtime:
    containers.patch_runtimes("tasks-0", shown)
    runtime = make_runtime(config)
    runtime.env = env
    if config.type == "apptainer":
        runtime._dir = tmp_path
    else:
        with pytest.raises(SandboxError, match="run failed"):
            await runtime.start()
    return runtime


@each_engine
@pytest.mark.usefixtures("_fake_engine")
async def test_command_lines_hold_no_secret(config: Config, tmp_path: Path) -> None:
    runtime = await started(config, tmp_path, {"TOKEN": SECRET})
    for _ in range(2):
        result = await runtime.run(["sh", "-c", 'echo "$LEVEL: $TOKEN"'], {"LEVEL": "the program's"})
        assert result.stdout == f"the program's: {SECRET}\n"
    calls = (tmp_path / "asked").read_text()
    assert "quoted" not in calls and "two $LINES" not in calls
    assert "LEVEL=the program's" in json.loads(calls.splitlines()[-1])
    for file in tmp_path.glob("*.env"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(list(tmp_path.glob("*.env"))) == (config.type == "apptainer"), "one for each set of variables"


@each_engine
@pytest.mark.usefixtures("_fake_engine")
async def test_command_lines_hold_no_secret_that_a_task_renames_or_embeds(config: Config, tmp_path: Path) -> None:
    runtime = await started(config, tmp_path, {"KEY": SECRET, "HEADER": f"it's {SECRET}, {SECRET}", "OTHER": "'s"})
    result = await runtime.run([sys.executable, "-c", "import os; print(dict(os.environ))"], {})
    assert result.exit_code == 0, result.stderr
    seen = ast.literal_eval(result.stdout)
    assert (seen["KEY"], seen["HEADER"], seen["OTHER"]) == (SECRET, f"it's {SECRET}, {SECRET}", "'s")
    assert "TOKEN" not in seen
    calls = (tmp_path / "asked").read_text()
    assert "quoted" not in calls and "two $LINES" not in calls and "OTHER='s" in calls
    printing = ["sh", "-c", 'echo "$KEY; $TOKEN"']
    for token in (SECRET, "the task's", f"more than {SECRET}"):
        result = await runtime.run(printing, {"TOKEN": token})
        assert result.stdout == f"{SECRET}; {token}\n"
    with pytest.raises(SandboxError, match=r"gives a secret to 'A\\nB', which is not a valid name"):
        await runtime.run(["true"], {"A\nB": SECRET})


def test_variables_of_harbor_tasks_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one" / "tests").mkdir(parents=True)
    for name in ("tests/test.sh", "instruction.md"):
        (tmp_path / "one" / name).touch()
    (tmp_path / "one" / "task.toml").write_text("[environment]\nenv = {KEY = 'of ${TOKEN}'}\n")
    monkeypatch.setattr(containers, "_secret_names", set())
    monkeypatch.setenv("TOKEN", SECRET)
    (task,) = environments.load("harbor-local", {"path": str(tmp_path), "variables": ["TOKEN"]}).taskset.load()
    made = containers._derived_from_secrets(task.runtime_env())
    assert made == {"KEY": (("TOKEN",), "'of '\"$TOKEN\"")}


@each_engine
@pytest.mark.usefixtures("_fake_engine")
async def test_scripts_run_with_packages_of_the_node(config: Config, tmp_path: Path) -> None:
    # Commands of the fake see the whole host, so the test checks the options that show directories.
    shown = uv_scripts.environment_directories()
    assert not any(path.is_relative_to(other) for path in shown for other in shown if path != other)
    runtime = await started(config, tmp_path, {}, shown)
    runtime.scripts_dir = str(tmp_path / "scripts")
    script = (
        '# /// script\n# dependencies = ["msgspec"]\n# ///\nimport msgspec, sys\nprint(sys.prefix, sys.base_prefix)\n'
    )
    argv = await runtime.prepare_uv_script(script)
    result = await runtime.run(argv, {})
    assert (result.stdout, result.stderr) == (f"{sys.prefix} {sys.base_prefix}\n", "")
    calls = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    if config.type == "apptainer":
        binds = os.environ["APPTAINER_BIND"].split(",")
    else:
        (words,) = [words for words in calls if words[1] == "run"]
        binds = [value for option, value in itertools.pairwise(words) if option == "--volume"]
    assert binds == [f"{path}:{path}:ro" for path in shown]
    for prefix in (sys.prefix, sys.base_prefix):
        assert any(Path(prefix).is_relative_to(path) for path in shown)


APPTAINER = """#!/bin/sh
# A fake that writes logs of instances to the same place as apptainer 1.4.
echo "$1 $2 ${APPTAINER_CONFIGDIR:-$HOME/.apptainer} ${APPTAINER_CACHEDIR:-$HOME/.apptainer/cache}" >>"$0.asked"
[ "$1 $2" = "instance start" ] || exit 0
for last; do :; done
logs=${APPTAINER_CONFIGDIR:-$HOME/.apptainer}/instances/logs/node/user
mkdir -p "$logs" && touch "$logs/$last.out" "$logs/$last.err"
"""


@pytest.mark.usefixtures("_verifiers")
async def test_apptainer_writes_nothing_to_the_home_directory_and_keeps_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, run, image = tmp_path / "home", tmp_path / "run" / "containers", tmp_path / "image.sif"
    image.touch()
    for login in (".apptainer/docker-config.json", ".docker/config.json"):
        (home / login).parent.mkdir(parents=True)
        (home / login).write_text(login)
    put_on_path(monkeypatch, tmp_path, APPTAINER, "apptainer")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("APPTAINER_CONFIGDIR", raising=False)
    containers.use_directory(run)
    containers.patch_runtimes("tasks-0")
    ended, killed = (make_runtime(ApptainerConfig(image=str(image))) for _ in range(2))
    await ended.start()
    await killed.start()
    logs = run / "config" / "instances" / "logs" / "node" / "user"
    assert {path.stem for path in logs.iterdir()} == {ended._instance, killed._instance}
    calls = (tmp_path / "apptainer.asked").read_text().splitlines()
    assert len(calls) == 8 and all(line.endswith(f"{run}/config {run}/cache") for line in calls), calls
    assert (run / "config/docker-config.json").read_text() == ".apptainer/docker-config.json"
    assert (run / "config/config.json").read_text() == ".docker/config.json"
    await ended.stop()
    assert {path.stem for path in logs.iterdir()} == {killed._instance}
    containers.remove_stale(["apptainer"], "tasks-0")
    assert not list(logs.iterdir())
    assert len([path for path in home.rglob("*") if path.is_file()]) == 2, "apptainer wrote to the home directory"
    shutil.rmtree(killed._dir)


UNLIMITED = """#!/bin/sh
# A fake apptainer that cannot set limits.
echo "$@" >>"$0.asked"
case "$*" in *"--memory"*|*"--cpus"*)
  echo "FATAL:   container creation failed: while applying cgroups config: no session" >&2
  exit 255 ;;
esac
"""
LIMITED = """#!/bin/sh
echo "$@" >>"$0.asked"
"""


@pytest.mark.usefixtures("_verifiers")
@pytest.mark.parametrize("fake", [UNLIMITED, LIMITED], ids=["unlimited", "limited"])
async def test_limits_of_tasks_are_dropped_only_if_apptainer_cannot_set_them(
    fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(monkeypatch, tmp_path, fake, "apptainer")
    (tmp_path / "image.sif").touch()
    config = ApptainerConfig(image=str(tmp_path / "image.sif"), cpu=1, memory=2)
    containers.patch_runtimes("tasks-0")
    for _ in range(2):
        runtime = make_runtime(config)
        await runtime.start()
        await runtime.stop()
    calls = (tmp_path / "apptainer.asked").read_text().splitlines()
    starts = [line for line in calls if line.startswith("instance start")]
    assert len(starts) == 2
    assert all(("--memory 2.0g" in line and "--cpus 1" in line) == (fake == LIMITED) for line in starts), starts
    assert len([line for line in calls if line.startswith("exec --containall --memory")]) == 1, (
        "apptainer is probed once"
    )
    containers.patch_runtimes("tasks-0", limits=Limits(memory_gb=2))
    runtime = make_runtime(config)
    if fake == LIMITED:
        await runtime.start()
        await runtime.stop()
    else:
        with pytest.raises(SandboxError, match=r"cannot enforce runtime.limits.memory_gb here.*no session"):
            await runtime.start()
