"""`disk_gb` and `network: none` with apptainer: the real program if it is installed, and fakes of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ApptainerConfig, Runtime, make_runtime, provision_runtime

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import checks
from primeslurm.orchestrator.environments.sandbox import apptainer, containers
from primeslurm.orchestrator.environments.sandbox.limits import bubblewrap_problem
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.sandboxes import Limits
from tests.support.fake_programs import put_on_path
from tests.support.verifiers_restored import restored

MIB = 1 << 20
IN_IMAGE = ("cat", "cp", "dd", "env", "ls", "mkdir", "sh")
FILL = "dd if=/dev/zero of=$0/fill bs=65536 count=2048 conv=fsync"
FAKE_DISK = (
    f"#!{sys.executable} -IS"
    + r'''
"""A fake apptainer: an image is a directory, and nothing runs in an instance."""
import json, os, pathlib, shutil, sys
words = sys.argv[1:]
if words[0] == "exec":
    place = words[words.index("--bind") + 1].partition(":")[0]
    shutil.copytree(words[-7] + words[-2], place, dirs_exist_ok=True)
if words[:2] == ["instance", "start"]:
    shutil.copyfile(words[words.index("--overlay") + 1], sys.argv[0] + ".disk")
    pathlib.Path(sys.argv[0] + ".asked").write_text(json.dumps(words))
'''
)
needs_mke2fs = pytest.mark.skipif(
    apptainer.find_program("mke2fs") is None, reason="mke2fs (e2fsprogs) is not installed"
)


@pytest.fixture(autouse=True)
def _verifiers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with restored(monkeypatch):
        yield
    assert not list((tmp_path / "scratch").iterdir()), "a sandbox left files"


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SIF with some programs of this machine, and a file in its working directory."""
    if shutil.which("apptainer") is None or apptainer.missing_for_disks():
        pytest.skip("apptainer, fuse2fs, fuse-overlayfs or mke2fs is not installed")
    (tmp_path / "config").mkdir()
    monkeypatch.setenv(containers.CONFIG, str(tmp_path / "config"))  # else logs stay in the home directory
    root = tmp_path / "root"
    for name in ("app/deep", "dev", "etc", "proc", "sys", "tmp", "var/tmp", "usr/bin", "root", "home"):
        (root / name).mkdir(parents=True)
    (root / "app/deep/given").write_text("of the image")
    for link in ("bin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    libraries = set()
    for name in IN_IMAGE:
        program = shutil.which(name)
        assert program is not None
        shutil.copy(program, root / "usr/bin" / name)
        libraries_of_program = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        libraries |= {word for word in libraries_of_program.split() if word.startswith("/")}
    for library in libraries:
        copy = root / "usr" / os.path.normpath(library).lstrip("/").removeprefix("usr/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)
    sif = tmp_path / "image.sif"
    words = ["apptainer", "build", "--disable-cache", str(sif), str(root)]
    subprocess.run(words, check=True, capture_output=True)
    return sif


@pytest.mark.parametrize("network", ["open", "none"])
async def test_files_of_a_rollout_are_limited_everywhere(
    image: Path, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINER_USERNS", "1")
    monkeypatch.setenv(
        "APPTAINER_NO_PRIVS", "1"
    )  # root in the container needs capabilities that root of some hosts lacks
    containers.patch_runtimes("tasks-0", limits=Limits.model_validate({"disk_gb": 0.05, "network": network}))
    async with provision_runtime(ApptainerConfig(image=str(image))) as runtime:
        result = await runtime.run(["sh", "-c", "cat deep/given && echo mine >deep/given && cat deep/given"], {})
        assert result.stdout == "of the imagemine\n", result.stderr
        for place in ("/app", "/tmp", "/var/tmp", str(Path.home())):
            full = await runtime.run(["sh", "-c", f"{FILL}; echo $?; : >$0/fill", place], {})
            assert "No space left on device" in full.stderr and full.stdout == "1\n", place
        await runtime.write("/app/kept", b"x" * MIB)
        assert len(await runtime.read("/app/kept")) == MIB, "the disk has room again"
        (disk,) = Path(tempfile.gettempdir()).glob("vf-apptainer-*/disk.img")
        assert disk.stat().st_blocks * 512 <= disk.stat().st_size == 50_000_000


@needs_mke2fs
async def test_disk_has_the_files_of_the_image_or_is_too_small_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(monkeypatch, tmp_path, FAKE_DISK, "apptainer")
    (tmp_path / "image/app").mkdir(parents=True)
    (tmp_path / "image/app/given").write_text("of the image")
    containers.patch_runtimes("tasks-0", limits=Limits(disk_gb=0.05))
    monkeypatch.setattr(apptainer.FixedSizeDisk, "_image", lambda self: asyncio.sleep(0, str(tmp_path / "image")))
    async with provision_runtime(ApptainerConfig()):
        start_options = (tmp_path / "apptainer.asked").read_text()
    made = tmp_path / "apptainer.disk"
    assert made.stat().st_size == 50_000_000
    assert "--writable-tmpfs" not in start_options and "--bind" not in start_options and "home,tmp" in start_options
    debugfs = shutil.which("debugfs", path=apptainer._ADMIN_PATH)
    assert debugfs is not None
    words = [debugfs, "-R", "cat upper/app/given", str(made)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "of the image"
    (tmp_path / "image/app/given").write_bytes(os.urandom(60 * MIB))
    with pytest.raises(SandboxError, match=r"runtime\.limits\.disk_gb is too small for the image's files"):
        async with provision_runtime(ApptainerConfig()):
            pass


def test_host_without_fuse2fs_is_reported_before_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = {"type": "apptainer", "limits": {"disk_gb": 3}}
    made = Environment.model_validate({"id": "tool-use", "harness": {"id": "bash"}, "runtime": runtime})
    env = environments.load_from_recipe(made)
    monkeypatch.setattr(checks, "_missing_for_runtime", lambda *_: ())
    monkeypatch.setattr(apptainer, "find_program", lambda name: None if name == "fuse2fs" else f"/bin/{name}")
    monkeypatch.setattr(os, "access", lambda *_: True)
    (problem,) = checks.missing_needs(made, env)
    assert problem.field == "environments.runtime.limits.disk_gb" and problem.why.endswith("no fuse2fs")
    monkeypatch.setattr(apptainer, "find_program", lambda name: f"/bin/{name}")
    assert checks.missing_needs(made, env) == []


FAKE_NETWORK = (
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
    put_on_path(monkeypatch, tmp_path, FAKE_NETWORK, "apptainer")
    (tmp_path / "image.sif").touch()
    for name in apptainer.PRIVATE_NETWORK:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what the code sets
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
    assert [each.value for each in checks.missing_needs(made, env)] == ["none"]
