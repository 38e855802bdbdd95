"""`network: none` with apptainer: a fake apptainer creates and enters real namespaces."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ApptainerConfig, Runtime, make_runtime

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import checks
from primeslurm.orchestrator.environments.sandbox import apptainer, containers
from primeslurm.orchestrator.environments.sandbox.limits import bubblewrap_problem
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.sandboxes import Limits
from tests.support.fake_programs import put_on_path

FAKE = (
    f"#!{sys.executable} -IS"
    + r'''
"""A fake apptainer: an instance is a process, in its own namespaces if the environment says so."""
import os, pathlib, signal, subprocess, sys, time
LOOPBACK_UP = (
    "import fcntl, os, socket, struct, sys, time; flags = struct.pack('16sh14x', b'lo', 1); "
    "fcntl.ioctl(socket.socket(), 0x8914, flags); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
)
def network(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""
words = sys.argv[1:]
if words[:2] == ["instance", "start"]:
    is_private = os.environ.get("APPTAINER_NET") == "1" and os.environ.get("APPTAINER_NETWORK") == "none"
    space = ["unshare", "--user", "--map-root-user", "--net"] if is_private else []
    file = pathlib.Path(sys.argv[0] + "." + words[-1])
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([*space, sys.executable, "-IS", "-c", LOOPBACK_UP, file], start_new_session=True, **quiet)
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
elif words[:2] == ["instance", "list"]:
    pid = pathlib.Path(sys.argv[0] + "." + words[-1]).read_text()
    print("INSTANCE NAME    PID    IP    IMAGE", f"{words[-1]}    {pid}          /image.sif", sep="\n")
elif words[:2] == ["instance", "stop"]:
    pid = pathlib.Path(sys.argv[0] + "." + words[-1]).read_text()
    namespace, inside = network(pid), [pid]
    if namespace not in ("", network("self")):  # as with apptainer, all that was started in its namespaces ends with it
        inside = [other for other in filter(str.isdigit, os.listdir("/proc")) if network(other) == namespace]
    for each in inside:
        os.kill(int(each), signal.SIGKILL)
elif words[0] == "exec" and (instance := [word for word in words if word.startswith("instance://")]):
    pid = pathlib.Path(sys.argv[0] + "." + instance[0].removeprefix("instance://")).read_text()
    space = [f"--user=/proc/{pid}/ns/user", f"--net=/proc/{pid}/ns/net", "--preserve-credentials", "--"]
    os.execvp("nsenter", ["nsenter", *space, *words[words.index(instance[0]) + 1 :]])
'''
)
CONNECT = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3); print('open')"
SERVE = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, bind='127.0.0.1', port=8000)"
FETCH = "import sys,urllib.request as u; print(len(u.urlopen(sys.argv[1]).read()))"


@pytest.fixture
async def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runtime]:
    """A running instance with `network: none`."""
    why = bubblewrap_problem()
    if why and os.getuid() != 0:
        pytest.skip(why)  # this user may not create namespaces
    put_on_path(monkeypatch, tmp_path, FAKE, "apptainer")
    (tmp_path / "image.sif").touch()
    for name in apptainer.PRIVATE_NETWORK:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what the code sets
    for name in ("ApptainerRuntime", "DockerRuntime", "PodmanRuntime"):
        monkeypatch.setattr(runtimes, name, getattr(runtimes, name))
    containers.patch_runtimes("tasks-0", limits=Limits(network="none"))
    made = make_runtime(ApptainerConfig(image=str(tmp_path / "image.sif")))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def test_programs_reach_only_the_endpoints_of_their_rollout(instance: Runtime) -> None:
    async def connects(host: str, port: int) -> bool:
        return (await instance.run([sys.executable, "-c", CONNECT, host, str(port)], {})).stdout == "open\n"

    with socket.create_server(("127.0.0.1", 0)) as allowed, socket.create_server(("127.0.0.1", 0)) as other:
        own_port, elsewhere = allowed.getsockname()[1], other.getsockname()[1]
        assert not await connects("127.0.0.1", own_port)
        assert instance.host_url(f"http://127.0.0.1:{own_port}/v1") == f"http://127.0.0.1:{own_port}/v1"
        assert await asyncio.gather(*(connects("127.0.0.1", own_port) for _ in range(3))) == [True] * 3
        assert not await connects("127.0.0.1", elsewhere)
        assert not await connects("1.1.1.1", 443)


async def test_server_inside_is_reachable_from_the_node(instance: Runtime, tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "page").write_bytes(b"x" * 300_000)
    serving = ["sh", "-c", f'cd {tmp_path} && exec "$0" -u -c "$1"', sys.executable, SERVE]
    await instance.run_background(serving, {}, str(log))
    while "Serving" not in (log.read_text() if log.exists() else ""):
        await asyncio.sleep(0.05)
    url = await instance.expose(8000)
    fetching = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FETCH, f"{url}/page", stdout=asyncio.subprocess.PIPE
    )
    assert (await fetching.communicate())[0] == b"300000\n"


async def test_network_that_cannot_be_entered_is_an_error(instance: Runtime) -> None:
    instance.cleanup()
    instance.host_url("http://127.0.0.1:1/v1")
    with pytest.raises(SandboxError, match="cannot enter the container's network: nsenter: "):
        await instance.run(["true"], {})


def test_host_without_nsenter_is_reported_before_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = {"type": "apptainer", "install": False, "limits": {"network": "none"}}
    made = Environment.model_validate({"id": "tool-use", "harness": {"id": "bash"}, "runtime": runtime})
    assert "allow" not in environments.agent_options(made)["runtime"], "verifiers' apptainer has no such option"
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nsenter" else f"/bin/{name}")
    env = environments.load_from_recipe(made)
    assert [each.value for each in checks.missing(made, env)] == ["none"]
