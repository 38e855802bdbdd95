"""Sandboxes against programs that want out of them: real bubblewrap, real control groups or what stands in for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig, make_runtime

from primeslurm.orchestrator.environments.sandbox import bwrap_sandbox, limits, port_forwarding
from primeslurm.orchestrator.environments.sandbox.install import install
from primeslurm.orchestrator.environments.sandbox.limits import SandboxLimits, bubblewrap_works
from primeslurm.orchestrator.environments.sandbox.runtime import SandboxedRuntime, _Pipes
from primeslurm.recipe.sections.sandboxes import Limits, SubprocessRuntime
from primeslurm.wire.transport import secret
from tests.support.strangers import attempted, needs_second_user, stranger
from tests.support.verifiers_restored import restored

SECRET = "5ec2e7" * 4
PATIENCE_S = 120
BOMB = """
import contextlib, os, time
for _ in range(10):
    with contextlib.suppress(OSError):
        os.fork()
time.sleep(0.5)
"""
SMALL = {"memory_gb": 0.1, "disk_gb": 0.02, "processes": 40}


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    why = bubblewrap_works()
    if why and os.getuid() != 0:
        pytest.skip(why)  # only root's set-up can install it
    assert not why


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory with its secret; verifiers is put back afterwards."""
    monkeypatch.setenv(secret.VARIABLE, SECRET)
    made = tmp_path / "runs" / "a-run"
    (made / "attempts" / "1").mkdir(parents=True)
    (made / secret.FILE).write_text(SECRET)
    with restored(monkeypatch):
        yield made


@contextlib.asynccontextmanager
async def sandbox(run_dir: Path, **allowed: object) -> AsyncIterator[SandboxedRuntime]:
    """What verifiers makes of its subprocess runtime in a worker."""
    asked = SubprocessRuntime(limits=Limits.model_validate({**SMALL, **allowed}))
    install(asked, run_dir / "attempts/1/environments", run_dir / "containers", [run_dir])
    made = make_runtime(SubprocessConfig())
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def sh(runtime: SandboxedRuntime, command: str) -> ProgramResult:
    return await runtime.run(["sh", "-c", command], {})


async def still_works(runtime: SandboxedRuntime) -> bool:
    """Whether another rollout of the worker runs its programs."""
    return (await sh(runtime, "echo well")).stdout == "well\n"


async def test_secret_and_run_directory_are_out_of_sight(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{run_dir.parents[1]}")  # shows what is around
    (run_dir.parents[1] / "visible.txt").write_text("seen")
    async with sandbox(run_dir) as runtime:
        assert (await sh(runtime, f"cat {run_dir.parents[1]}/visible.txt")).stdout == "seen"
        for command in (f"cat {run_dir}/secret", f"ls {run_dir}/attempts", f"cat {run_dir}/../a-run/secret"):
            result = await sh(runtime, command)
            assert result.exit_code != 0 and SECRET not in result.stdout + result.stderr
        assert (await sh(runtime, f"ls -A {run_dir}")).stdout == ""


async def test_environments_of_other_processes_are_out_of_sight(run_dir: Path) -> None:
    os.environ["SOME_API_KEY"] = SECRET
    async with sandbox(run_dir) as runtime:
        everything = await sh(
            runtime, "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; ls /proc | grep -c '^[0-9]'"
        )
        assert SECRET not in everything.stdout
        assert int(everything.stdout.split()[-1]) < 10, "processes of the node are seen"
        assert str(os.getpid()) not in (await sh(runtime, "ls /proc")).stdout.split()
        given = await runtime.run(["sh", "-c", "echo $TOKEN"], {"TOKEN": "mine"})
        assert given.stdout == "mine\n"


async def test_rollouts_do_not_see_one_another_nor_the_node(run_dir: Path) -> None:
    probe = Path("/tmp") / f"primeslurm-test-{os.getpid()}"
    probe.write_text("the node's")
    try:
        async with sandbox(run_dir) as one, sandbox(run_dir) as other:
            await one.write("/app/mine", b"x")
            await one.write("/tmp/mine", b"x")
            seen = (await sh(other, f"ls /app /tmp {probe}; cat /app/mine")).stdout.split()
            assert {"/app:", "/tmp:"}.issubset(seen), "of a checkout below /tmp, the way to its Python is there"
            assert {"/app:", "/tmp:"}.union(Path(sys.prefix).parts).issuperset(seen)
            assert (await sh(other, "touch /usr/x /etc/x; echo $?; id -u")).stdout.split()[-1] == "1000"
            assert (await sh(other, "cat /etc/shadow /etc/munge/munge.key")).stdout == ""
            homes = (await sh(other, f"ls -A /home {Path.home()} 2>/dev/null")).stdout.split()
            assert {"/home:", "user", f"{Path.home()}:"}.union(Path(sys.base_prefix).parts).issuperset(homes)
            assert not probe.with_name("x").exists() and not Path("/usr/x").exists()
    finally:
        probe.unlink()


async def test_a_fork_bomb_is_held(run_dir: Path) -> None:
    async with sandbox(run_dir) as other, sandbox(run_dir) as runtime:
        assert await still_works(other)
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(SandboxError):
                await runtime.run([sys.executable, "-c", BOMB], {})
        assert len(_of(runtime)) <= SMALL["processes"]
        assert await still_works(other)


async def test_a_full_disk_is_its_own(run_dir: Path) -> None:
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
        assert len(sizes) == 2 and min(sizes) > 0 and sum(sizes) <= 20_000_000, "no more than `plan` counts"
        assert (
            await sh(runtime, "for i in 1 2 3; do head -c 9000000 /dev/zero > /app/$i; done; du -sb /app")
        ).exit_code == 0
        assert (await sh(runtime, "head -c 99 /dev/zero > /dev/x; touch /dev/y")).exit_code != 0
        assert await still_works(runtime)


async def test_too_much_memory_is_held(run_dir: Path) -> None:
    eat = "import os\nfor _ in range(4): os.fork()\nx = b'1' * 90_000_000\nprint('all')"
    async with sandbox(run_dir) as other, sandbox(run_dir) as runtime:
        assert await still_works(other)
        with contextlib.suppress(SandboxError):
            result = await runtime.run([sys.executable, "-c", eat], {})
            assert result.stdout.count("all") < 16
        assert await still_works(other)


async def test_without_control_groups_the_watch_ends_what_uses_too_much(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_parents", dict)
    eat = "import time\nfor _ in range(3): __import__('os').fork()\nx = b'1' * 60_000_000; time.sleep(60)"
    async with sandbox(run_dir) as other, sandbox(run_dir) as greedy, sandbox(run_dir) as many:
        assert await still_works(other)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(SandboxError, match="GB of memory"):
                await greedy.run([sys.executable, "-c", eat], {})
            with contextlib.suppress(
                SandboxError
            ):  # a user's processes are counted, root's are not: then the watch sees
                await many.run(["bash", "-c", "for i in $(seq 60); do sleep 60 & done; sleep 60"], {})
            while len(_of(many)) > SMALL["processes"]:
                await asyncio.sleep(0.05)
        assert await still_works(other)


async def test_the_network_is_closed_but_for_the_rollouts_endpoints(run_dir: Path) -> None:
    connect = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3); print('open')"
    with socket.create_server(("127.0.0.1", 0)) as allowed, socket.create_server(("0.0.0.0", 0)) as other:
        own, elsewhere = allowed.getsockname()[1], other.getsockname()[1]
        async with sandbox(run_dir) as runtime:
            assert runtime.host_url(f"http://127.0.0.1:{own}/v1") == f"http://127.0.0.1:{own}/v1"
            result = await runtime.run([sys.executable, "-c", connect, "127.0.0.1", str(own)], {})
            assert result.stdout == "open\n"
            address = _address()
            for host, port in (("127.0.0.1", elsewhere), (address, elsewhere), (address, own), ("1.1.1.1", 443)):
                assert (await runtime.run([sys.executable, "-c", connect, host, str(port)], {})).stdout == ""
            assert (await sh(runtime, "grep -c : /proc/net/dev")).stdout == "1\n", "there is more than loopback"
        async with sandbox(run_dir, network="open") as runtime:
            opened = await runtime.run([sys.executable, "-c", connect, "127.0.0.1", str(elsewhere)], {})
            assert opened.stdout == "open\n"


async def logged(tools: SandboxedRuntime, word: bytes) -> None:
    """Wait until a program in the background has said something; it begins after whoever started it goes on."""
    while True:
        with contextlib.suppress(SandboxError):  # there is no log yet
            if word in await tools.read("log"):
                return
        await asyncio.sleep(0.05)


async def test_servers_within_are_reached_from_outside_and_from_other_sandboxes(run_dir: Path) -> None:
    serve = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, bind='127.0.0.1', port=8000)"
    fetch = "import sys,urllib.request as u; print(len(u.urlopen(sys.argv[1]).read()))"
    async with sandbox(run_dir) as tools, sandbox(run_dir) as agent:
        await tools.write("page", b"x" * 3_000_000)
        await tools.run_background([sys.executable, "-u", "-c", serve], {}, "log")
        await logged(tools, b"Serving")
        url = await tools.expose(8000)
        agent.host_url(url)
        result = await agent.run([sys.executable, "-c", fetch, f"{url}/page"], {})
        assert result.stdout == "3000000\n", result.stderr


@needs_second_user
async def test_other_users_reach_no_server_within_and_take_no_connection_of_its_rollout(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel's whole table of sockets is read for each connection, one after the other, and the rollout's own one
    # waits for that: the fewer there are, the less a busy machine with many sockets matters.
    monkeypatch.setattr(port_forwarding, "CONNECTIONS", 4)
    echo = "import socket as s; l = s.create_server(('127.0.0.1', 8000), backlog=100); print('well', flush=True)"
    echo += "\nwhile c := l.accept()[0]: c.recv(1) and c.sendall(b'an answer')"
    async with sandbox(run_dir) as tools:
        await tools.run_background([sys.executable, "-u", "-c", echo], {}, "log")
        await logged(tools, b"well")
        port = int((await tools.expose(8000)).rpartition(":")[2])
        kept = []

        def connected() -> socket.socket:
            kept.append(socket.socket())
            kept[-1].settimeout(PATIENCE_S)
            kept[-1].connect(("127.0.0.1", port))
            return kept[-1]

        def asks() -> str:
            with contextlib.suppress(ConnectionError):  # hung up on before or after it has asked
                connected().sendall(b"?")
                return kept[-1].recv(9).decode()
            return ""

        with stranger(lambda: len([connected() for _ in range(port_forwarding.CONNECTIONS)])) as silent:
            assert silent.value == port_forwarding.CONNECTIONS
            assert await asyncio.to_thread(asks) == "an answer"
        assert (await asyncio.to_thread(attempted, asks)).value == ""


async def test_programs_end_with_their_sandbox(run_dir: Path) -> None:
    async with sandbox(run_dir) as runtime:
        # out of its process group, its session, its parent, and deaf
        await sh(runtime, "setsid nohup sh -c 'trap \"\" TERM HUP INT; sleep 1000' >/dev/null 2>&1 & sleep 0.3")
        inner = _of(runtime)
        assert len(inner) > 2
        group = runtime._box.group  # type: ignore[union-attr]
    await _gone(inner)
    assert group is None or not any(path.exists() for path in group.directories.values())
    assert not list((run_dir / "attempts/1").rglob("*")), "directories are left"
    assert str(run_dir) not in Path("/proc/self/mounts").read_text()


async def test_a_program_that_kills_or_stops_everything_only_loses_its_own_sandbox(run_dir: Path) -> None:
    async with sandbox(run_dir) as other, sandbox(run_dir) as killed, sandbox(run_dir) as stopped:
        assert await still_works(other)
        with pytest.raises(SandboxError, match="gone"):
            await sh(killed, "kill -9 -1; sleep 100")
        with pytest.raises(SandboxError, match="gone"):
            await sh(killed, "true")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await sh(stopped, "kill -STOP -1; sleep 100")
        assert await still_works(other)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_sandbox_that_dies_leaves_no_descriptor(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of what nobody reads yet, nor of what nobody reads any more."""
    held: list[int] = []

    async def spawn(
        runtime: SandboxedRuntime, argv: list[str], env: dict[str, str], pipes: _Pipes
    ) -> bwrap_sandbox.SandboxProcess:
        process, gone = bwrap_sandbox.SandboxProcess(made, 1), port_forwarding.SandboxGoneError("it has ended")
        held.append(os.dup(pipes.inner[0]))  # as by what it started
        if at_once:
            process.exited.set_exception(gone)
        else:
            asyncio.get_running_loop().call_later(0.05, process.exited.set_exception, gone)
        return process

    made = bwrap_sandbox.Sandbox(SandboxLimits(), (), ())
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
    assert not {path for path in left if path.exists()}, "but for the one that the directory was read by"


async def test_output_without_end_does_not_fill_the_worker(run_dir: Path) -> None:
    async with sandbox(run_dir) as runtime:
        result = await sh(runtime, "head -c 40000000 /dev/zero; echo the end >&2")
        assert len(result.stdout) == 16 << 20 and result.stderr == "the end\n"
        with pytest.raises(SandboxError, match="over the 100 byte limit"):
            await runtime.read("/dev/zero", max_bytes=100)
        await sh(runtime, "ln -s /etc/passwd link")
        assert b"user" in await runtime.read("link") and b"root" not in (await runtime.read("link")).split(b"user")[1]


async def test_what_no_program_can_be_given_is_a_value_error(run_dir: Path) -> None:
    async with sandbox(run_dir) as runtime:
        for text in ("a\0b", "\ud800"):
            with pytest.raises(ValueError, match=r"null byte|surrogates"):
                await runtime.run(["echo", text], {})
        with pytest.raises(SandboxError, match="cannot start 'nothing-like-it'"):
            await runtime.run(["nothing-like-it"], {})
        with pytest.raises(SandboxError, match="File name too long"):
            await runtime.run(["n" * 20_000], {})
        with pytest.raises(SandboxError, match="Argument list too long"):
            await runtime.run(["echo", "x" * 200_000], {})
        assert (await runtime.run(["echo", "é x"], {})).stdout == "é x\n"


async def test_a_killed_worker_leaves_nothing(run_dir: Path) -> None:
    code = f"""
        import asyncio, sys, pathlib
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from tests.unit.orchestrator.test_sandbox import sandbox, _of
        async def main():
            async with sandbox(pathlib.Path({str(run_dir)!r})) as runtime:
                await runtime.run(["sh", "-c", "setsid sleep 1000 & sleep 0.2"], {{}})
                group = runtime._box.group
                print(*_of(runtime), "|", *(group.directories.values() if group else ()), flush=True)
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
    await _gone([int(pid) for pid in pids.split()])
    limits.remove_stale_groups()  # as the next worker does
    assert not [path for path in groups.split() if Path(path).exists()]
    assert not list((run_dir / "attempts/1").rglob("*"))


async def test_without_bubblewrap_it_is_said(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sandbox(run_dir) as runtime:
        os.environ["PATH"] = "/nonexistent"
        with pytest.raises(SandboxError, match="bubblewrap"):
            await sh(runtime, "true")


def _of(runtime: SandboxedRuntime) -> list[int]:
    """Processes of a sandbox, as the node numbers them."""
    from primeslurm.orchestrator.environments.sandbox.watch import uses

    bwrap_sandbox = runtime._box
    assert bwrap_sandbox is not None
    return [
        pid for pid in uses([bwrap_sandbox.first_pid])[bwrap_sandbox.first_pid].pids if Path(f"/proc/{pid}").exists()
    ]


async def _gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{alive} still run"
        await asyncio.sleep(0.05)


def _address() -> str:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.2"
