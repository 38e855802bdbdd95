"""Sandboxes against hostile programs: real bubblewrap, with real control groups or their replacement."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig, make_runtime

import primeslurm
from primeslurm.node.agent.liveness_monitor import condition_of
from primeslurm.orchestrator.environments.sandbox import bwrap_args, bwrap_sandbox, limits, port_forwarding
from primeslurm.orchestrator.environments.sandbox.install import install
from primeslurm.orchestrator.environments.sandbox.limit_watcher import measure_usage, proportional_memory
from primeslurm.orchestrator.environments.sandbox.limits import SandboxLimits, bubblewrap_problem
from primeslurm.orchestrator.environments.sandbox.runtime import SandboxedRuntime, _Pipes
from primeslurm.orchestrator.worker.main import hidden_directories
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.sandboxes import Limits, SubprocessRuntime
from primeslurm.wire.transport import secret
from tests.support.strangers import attempted, needs_second_user, stranger
from tests.support.verifiers_restored import restored
from tests.support.waiting import wait_until_async

SECRET = "5ec2e7" * 4
TIMEOUT_S = 120
FORK_BOMB = """
import contextlib, os, time
first = os.getpid()
for _ in range(10):
    with contextlib.suppress(OSError):
        os.fork()
if os.getpid() != first:
    os.closerange(0, 9)  # the caller waits until nobody can write there
    time.sleep(3600)
"""
SMALL = {"memory_gb": 0.1, "disk_gb": 0.02, "processes": 40}


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    why = bubblewrap_problem()
    if why and os.getuid() != 0:
        pytest.skip(why)  # the set-up of other users cannot install it
    assert not why


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory with its secret. Changes to verifiers are undone afterwards."""
    monkeypatch.setenv(secret.VARIABLE, SECRET)
    made = tmp_path / "runs" / "a-run"
    (made / "attempts" / "1").mkdir(parents=True)
    (made / secret.FILE).write_text(SECRET)
    with restored(monkeypatch):
        yield made


@contextlib.asynccontextmanager
async def sandbox(run_dir: Path, **allowed: object) -> AsyncIterator[SandboxedRuntime]:
    """The runtime that verifiers creates in a worker."""
    recipe = SubprocessRuntime(limits=Limits.model_validate({**SMALL, **allowed}))
    install(recipe, run_dir / "attempts/1/environments", run_dir / "containers", [run_dir])
    made = make_runtime(SubprocessConfig())
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def sh(runtime: SandboxedRuntime, command: str) -> ProgramResult:
    return await runtime.run(["sh", "-c", command], {})


async def python(runtime: SandboxedRuntime, code: str, *args: str) -> ProgramResult:
    return await runtime.run([sys.executable, "-c", code, *args], {})


async def still_works(runtime: SandboxedRuntime) -> bool:
    """Tell whether another rollout of the worker can run programs."""
    return (await sh(runtime, "echo well")).stdout == "well\n"


async def test_secret_and_run_directory_are_hidden(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{run_dir.parents[1]}")  # makes it visible
    (run_dir.parents[1] / "visible.txt").write_text("seen")
    async with sandbox(run_dir) as runtime:
        assert (await sh(runtime, f"cat {run_dir.parents[1]}/visible.txt")).stdout == "seen"
        for command in (f"cat {run_dir}/secret", f"ls {run_dir}/attempts", f"cat {run_dir}/../a-run/secret"):
            result = await sh(runtime, command)
            assert result.exit_code != 0 and SECRET not in result.stdout + result.stderr
        assert (await sh(runtime, f"ls -A {run_dir}")).stdout == ""


@pytest.mark.parametrize(
    ("visible", "covered"), [("", "lab"), ("lab", "lab"), ("lab/tenants/alice", "lab/tenants/alice/run")]
)
def test_the_deployment_of_a_tenant_is_hidden_with_its_keys(tmp_path: Path, visible: str, covered: str) -> None:
    run_dir = tmp_path / "lab" / "tenants" / "alice" / "run"
    run_dir.mkdir(parents=True)
    tenant = {"service": "http://a:1", "router": "http://b:2", "adapters": str(tmp_path / "lab/tinker/checkpoints")}
    recipe = Recipe.model_validate({"name": "a", "seq_len": 64, "model": {"path": "/m"}, "tenant": tenant})
    hidden = hidden_directories(recipe, run_dir)
    args = bwrap_args.bwrap_args([tmp_path / visible], hidden, {}, 1 << 30, False)
    assert [path for option, path in pairwise(args) if option == "--tmpfs"][1:-1] == [str(tmp_path / covered)]


def test_of_an_editable_checkout_only_the_package_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(primeslurm.__file__).parent
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", ["", str(package.parent)])
    assert package in bwrap_args.python_paths() and package.parent not in bwrap_args.python_paths()


async def test_environments_of_other_processes_are_hidden(run_dir: Path) -> None:
    os.environ["SOME_API_KEY"] = SECRET
    async with sandbox(run_dir) as runtime:
        everything = await sh(
            runtime, "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; ls /proc | grep -c '^[0-9]'"
        )
        assert SECRET not in everything.stdout
        assert int(everything.stdout.split()[-1]) < 10, "the sandbox sees processes of the node"
        assert str(os.getpid()) not in (await sh(runtime, "ls /proc")).stdout.split()
        result = await runtime.run(["sh", "-c", "echo $TOKEN"], {"TOKEN": "mine"})
        assert result.stdout == "mine\n"


async def test_files_of_other_rollouts_and_of_the_node_are_hidden(run_dir: Path) -> None:
    name = f"primeslurm-test-{uuid.uuid4().hex}"
    probe = Path("/tmp") / name
    probe.write_text("the node's")
    try:
        async with sandbox(run_dir) as one, sandbox(run_dir) as other:
            await one.write("/app/mine", b"x")
            await one.write(f"/tmp/{name}-mine", b"x")
            seen = (await sh(other, f"ls /app /tmp {probe}; cat /app/mine")).stdout.split()
            # If the checkout is below /tmp, the path to its Python exists in the sandbox.
            assert {"/app:", "/tmp:"}.issubset(seen)
            assert {"/app:", "/tmp:"}.union(Path(sys.prefix).parts).issuperset(seen)
            assert (await sh(other, f"touch /usr/{name} /etc/{name}; echo $?; id -u")).stdout.split()[-1] == "1000"
            assert (await sh(other, "cat /etc/shadow /etc/munge/munge.key")).stdout == ""
            homes = (await sh(other, f"ls -A /home {Path.home()} 2>/dev/null")).stdout.split()
            assert {"/home:", "user", f"{Path.home()}:"}.union(Path(sys.base_prefix).parts).issuperset(homes)
            left = (Path(f"/tmp/{name}-mine"), Path(f"/usr/{name}"), Path(f"/etc/{name}"))
            assert not any(path.exists() for path in left)
    finally:
        probe.unlink()


async def test_fork_bomb_is_contained(run_dir: Path) -> None:
    async with sandbox(run_dir) as other, sandbox(run_dir) as runtime:
        assert await still_works(other)
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(SandboxError):
                await python(runtime, FORK_BOMB)
        await wait_until_async(lambda: len(pids_of(runtime)) <= SMALL["processes"])
        assert await still_works(other)


async def test_files_of_a_sandbox_are_limited_in_total(run_dir: Path) -> None:
    async with sandbox(run_dir) as runtime:
        for place in ("/app", "/tmp", "/dev/shm", "/var/tmp", "/run"):
            result = await sh(
                runtime, f"head -c 60000000 /dev/zero > {place}/big; stat -c %s {place}/big; rm {place}/big"
            )
            assert "No space left" in result.stderr or "File too large" in result.stderr or result.exit_code
            assert int(result.stdout or 0) <= 20_000_000
        both = "head -c 60000000 /dev/zero > /app/big; head -c 60000000 /dev/zero > /dev/shm/big"
        result = await sh(runtime, f"{both}; stat -c %s /app/big /dev/shm/big; rm /app/big /dev/shm/big")
        sizes = [int(size) for size in result.stdout.split()]
        assert len(sizes) == 2 and min(sizes) > 0 and sum(sizes) <= 20_000_000, "the plan counts this much memory"
        several = "for i in 1 2 3; do head -c 9000000 /dev/zero > /app/$i; done; du -sb /app"
        assert (await sh(runtime, several)).exit_code == 0
        assert (await sh(runtime, "head -c 99 /dev/zero > /dev/x; touch /dev/y")).exit_code != 0
        assert await still_works(runtime)


async def test_memory_is_limited(run_dir: Path) -> None:
    eat = "import os\nfor _ in range(4): os.fork()\nx = b'1' * 90_000_000\nprint('all')"
    async with sandbox(run_dir) as other, sandbox(run_dir) as runtime:
        assert await still_works(other)
        with contextlib.suppress(SandboxError):
            assert (await python(runtime, eat)).stdout.count("all") < 16
        assert await still_works(other)


async def test_watcher_enforces_limits_without_control_groups(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_parent_groups", dict)
    eat = "import time\nfor _ in range(3): __import__('os').fork()\nx = b'1' * 60_000_000; time.sleep(60)"
    async with sandbox(run_dir) as other, sandbox(run_dir) as greedy, sandbox(run_dir) as many:
        assert await still_works(other)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(SandboxError, match="GB of memory"):
                await python(greedy, eat)
            # RLIMIT_NPROC stops other users' forks. Root has no such limit, so there the watcher kills the sandbox.
            with contextlib.suppress(SandboxError):
                await many.run(["bash", "-c", "for i in $(seq 60); do sleep 60 & done; sleep 60"], {})
            while len(pids_of(many)) > SMALL["processes"]:
                await asyncio.sleep(0.05)
        assert await still_works(other)


async def test_network_reaches_only_the_endpoints_of_the_rollout(run_dir: Path) -> None:
    connect = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 60); print('open')"
    with socket.create_server(("127.0.0.1", 0)) as allowed, socket.create_server(("0.0.0.0", 0)) as other:
        port, other_port = allowed.getsockname()[1], other.getsockname()[1]
        address = address_of_host()
        async with sandbox(run_dir) as runtime:
            assert runtime.host_url(f"http://127.0.0.1:{port}/v1") == f"http://127.0.0.1:{port}/v1"
            assert (await python(runtime, connect, "127.0.0.1", str(port))).stdout == "open\n"
            for target in (("127.0.0.1", other_port), (address, other_port), (address, port), ("1.1.1.1", 443)):
                assert (await python(runtime, connect, *map(str, target))).stdout == ""
            assert (await sh(runtime, "grep -c : /proc/net/dev")).stdout == "1\n", "there is more than loopback"
        async with sandbox(run_dir, network="open") as runtime:
            assert (await python(runtime, connect, "127.0.0.1", str(other_port))).stdout == "open\n"


async def wait_for_log(tools: SandboxedRuntime, word: bytes) -> None:
    """Wait until a background program has printed a word. It may start after `run_background` returns."""
    while True:
        with contextlib.suppress(SandboxError):  # there is no log yet
            if word in await tools.read("log"):
                return
        await asyncio.sleep(0.05)


async def test_server_inside_is_reachable_from_another_sandbox(run_dir: Path) -> None:
    serve = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, bind='127.0.0.1', port=8000)"
    fetch = "import sys,urllib.request as u; print(len(u.urlopen(sys.argv[1]).read()))"
    async with sandbox(run_dir) as tools, sandbox(run_dir) as agent:
        await tools.write("page", b"x" * 3_000_000)
        await tools.run_background([sys.executable, "-u", "-c", serve], {}, "log")
        await wait_for_log(tools, b"Serving")
        url = await tools.expose(8000)
        agent.host_url(url)
        result = await python(agent, fetch, f"{url}/page")
        assert result.stdout == "3000000\n", result.stderr


@needs_second_user
async def test_other_users_cannot_use_or_block_a_server_inside(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # For each connection, the kernel's whole table of sockets is read. A small limit keeps the test fast on hosts with
    # many sockets.
    monkeypatch.setattr(port_forwarding, "MAX_CONNECTIONS", 4)
    echo = "import socket as s; l = s.create_server(('127.0.0.1', 8000), backlog=100); print('well', flush=True)"
    echo += "\nwhile c := l.accept()[0]: c.recv(1) and c.sendall(b'an answer')"
    async with sandbox(run_dir) as tools:
        await tools.run_background([sys.executable, "-u", "-c", echo], {}, "log")
        await wait_for_log(tools, b"well")
        port = int((await tools.expose(8000)).rpartition(":")[2])
        connections = []

        def connect() -> socket.socket:
            connections.append(socket.socket())
            connections[-1].settimeout(TIMEOUT_S)
            connections[-1].connect(("127.0.0.1", port))
            return connections[-1]

        def ask() -> str:
            with contextlib.suppress(ConnectionError):  # closed before or after the request
                connect().sendall(b"?")
                return connections[-1].recv(9).decode()
            return ""

        with stranger(lambda: len([connect() for _ in range(port_forwarding.MAX_CONNECTIONS)])) as idle:
            assert idle.value == port_forwarding.MAX_CONNECTIONS
            assert await asyncio.to_thread(ask) == "an answer"
        assert (await asyncio.to_thread(attempted, ask)).value == ""


async def test_programs_end_with_their_sandbox(run_dir: Path) -> None:
    async with sandbox(run_dir) as runtime:
        # This program leaves its process group, session and parent, and ignores signals.
        stays = "setsid nohup sh -c 'trap \"\" TERM HUP INT; echo >/tmp/stays; sleep 1000' >/dev/null 2>&1"
        await sh(runtime, f"{stays} & until [ -e /tmp/stays ]; do sleep 0.05; done")
        pids = pids_of(runtime)
        assert len(pids) > 2
        group = runtime._sandbox.group  # type: ignore[union-attr]
    await wait_until_gone(pids)
    assert group is None or not any(path.exists() for path in group.directories.values())
    assert not list((run_dir / "attempts/1").rglob("*")), "directories are left"
    assert str(run_dir) not in Path("/proc/self/mounts").read_text()


async def test_program_that_kills_or_stops_everything_only_affects_its_own_sandbox(run_dir: Path) -> None:
    async with sandbox(run_dir) as other, sandbox(run_dir) as killed, sandbox(run_dir) as stopped:
        assert await still_works(other)
        for command in ("kill -9 -1; sleep 100", "true"):
            with pytest.raises(SandboxError, match="gone"):
                await sh(killed, command)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await sh(stopped, "kill -STOP -1; sleep 100")
        assert await still_works(other)


@pytest.mark.parametrize("is_immediate", [True, False])
async def test_sandbox_that_dies_leaks_no_file_descriptor(is_immediate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    made = bwrap_sandbox.Sandbox(SandboxLimits(), (), ())

    async def spawn(
        runtime: SandboxedRuntime, argv: list[str], env: dict[str, str], pipes: _Pipes
    ) -> bwrap_sandbox.SandboxProcess:
        process, gone = bwrap_sandbox.SandboxProcess(made, 1), port_forwarding.SandboxGoneError("it has ended")
        held.append(os.dup(pipes.inner[0]))  # as if a child of the program held it
        if is_immediate:
            process.exited.set_exception(gone)
        else:
            asyncio.get_running_loop().call_later(0.05, process.exited.set_exception, gone)
        return process

    monkeypatch.setattr(SandboxedRuntime, "_spawn", spawn)
    runtime = SandboxedRuntime(SubprocessConfig())
    before = set(Path("/proc/self/fd").iterdir())
    for use in (runtime.run(["true"], {}), runtime.write("/app/x", b"x" * (1 << 20)), runtime._read("/app/x")):
        with pytest.raises(SandboxError):
            await use
    for _ in range(5):
        await asyncio.sleep(0)
    left = set(Path("/proc/self/fd").iterdir()) - before - {Path(f"/proc/self/fd/{fd}") for fd in held}
    for fd in held:
        os.close(fd)
    assert not {path for path in left if path.exists()}, "exists() excludes the descriptor that iterdir() used"


async def test_endless_output_is_cut(run_dir: Path) -> None:
    async with sandbox(run_dir) as runtime:
        result = await sh(runtime, "head -c 40000000 /dev/zero; echo the end >&2")
        assert len(result.stdout) == 16 << 20 and result.stderr == "the end\n"
        with pytest.raises(SandboxError, match="over the 100 byte limit"):
            await runtime.read("/dev/zero", max_bytes=100)
        await sh(runtime, "ln -s /etc/passwd link")
        assert b"user" in await runtime.read("link") and b"root" not in (await runtime.read("link")).split(b"user")[1]


async def test_commands_that_cannot_start_are_errors(run_dir: Path) -> None:
    async with sandbox(run_dir) as runtime:
        for text in ("a\0b", "\ud800"):
            with pytest.raises(ValueError, match=r"null byte|surrogates"):
                await runtime.run(["echo", text], {})
        for argv, message in (
            (["nothing-like-it"], "cannot start 'nothing-like-it'"),
            (["n" * 20_000], "File name too long"),
            (["echo", "x" * 200_000], "Argument list too long"),
        ):
            with pytest.raises(SandboxError, match=message):
                await runtime.run(argv, {})
        assert (await runtime.run(["echo", "é x"], {})).stdout == "é x\n"


async def test_killed_worker_leaves_no_process_file_or_control_group(run_dir: Path) -> None:
    code = f"""
        import asyncio, sys, pathlib
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from tests.unit.orchestrator.test_sandbox import sandbox, pids_of
        async def main():
            async with sandbox(pathlib.Path({str(run_dir)!r})) as runtime:
                left = "setsid sh -c 'echo >/tmp/left; sleep 1000' & until [ -e /tmp/left ]; do sleep 0.05; done"
                await runtime.run(["sh", "-c", left], {{}})
                group = runtime._sandbox.group
                print(*pids_of(runtime), "|", *(group.directories.values() if group else ()), flush=True)
                await asyncio.sleep(1000)
        asyncio.run(main())
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        pids, groups = worker.stdout.readline().split("|")
    finally:
        worker.kill()
        worker.wait()
    assert len(pids.split()) >= 3
    await wait_until_gone([int(pid) for pid in pids.split()])
    limits.remove_stale_groups()  # as the next worker does
    assert not [path for path in groups.split() if Path(path).exists()]
    assert not list((run_dir / "attempts/1").rglob("*"))


async def test_missing_bubblewrap_is_an_error(run_dir: Path) -> None:
    async with sandbox(run_dir) as runtime:
        os.environ["PATH"] = "/nonexistent"
        with pytest.raises(SandboxError, match="bubblewrap"):
            await sh(runtime, "true")


def pids_of(runtime: SandboxedRuntime) -> list[int]:
    """Return the processes of a sandbox, as numbered on the node."""
    made = runtime._sandbox
    assert made is not None
    return [pid for pid in measure_usage([made.first_pid])[made.first_pid].pids if Path(f"/proc/{pid}").exists()]


async def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{alive} still run"
        await asyncio.sleep(0.05)


def address_of_host() -> str:
    """Return an address of this host other than loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.2"


HIDING = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
libc.prctl(15, ctypes.c_char_p(bytes.fromhex(sys.argv[1])), 0, 0, 0)  # PR_SET_NAME
held = b"1" * 40_000_000
if child := os.fork():
    os.wait()
print("there", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "name",
    [b"usual", b"\xff\xfe", b") R 1 2 (", b"a b\n1 2", b"\xe2\x98"],
    ids=["usual", "bytes", "stat", "lines", "half"],
)
def test_processes_are_counted_whatever_their_names(name: bytes) -> None:
    process = subprocess.Popen([sys.executable, "-c", HIDING, name.hex()], stdout=-1, start_new_session=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"there\n"
        (use,) = measure_usage([process.pid]).values()
        assert len(use.pids) == 2 and use.threads == 2 and use.resident > 80_000_000
        assert 40_000_000 < proportional_memory(use) < use.resident
        assert not condition_of(process.pid).stopped
    finally:
        os.killpg(process.pid, 9)
        process.wait()
