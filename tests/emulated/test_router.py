"""The real vllm-router over emulated engines: which clients it serves, and what happens to workers that it lost.

To TCP, another user of a node looks like any client without the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.support.ports import free_port
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.plan.commands.command import ReplicaEngines
from primeslurm.plan.commands.routers import router_command
from primeslurm.plan.stand_ins import STAND_INS
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import VllmRouter
from primeslurm.records.events import decode
from primeslurm.records.events.processes import RouterComplete, RouterIncomplete, RouterRestarted
from primeslurm.testbed.embedded_slurm.daemons import OsProcess
from primeslurm.wire.transport import secret
from tests.support.engine_commands import engine_command
from tests.support.generate import generate, tokens
from tests.support.processes import HOST, Server, fill, start_router
from tests.support.recipes import recipe_data
from tests.support.waiting import wait_until

PROMPT = [2, 5, 9, 14, 7, 3]
REMEMBERED_BYTES = 16 * 2**20
"""Size of invalid tokens after which these routers restart."""


@dataclass
class Routed:
    """A router and its engines."""

    router: Server
    engines: list[Server]
    directory: Path
    health: int

    @property
    def workers(self) -> list[str]:
        """Return the workers that the router lists; an empty set while it does not answer."""
        try:
            answer = httpx.get(f"{self.router.url}/list_workers", headers=secret.header(), timeout=60)
        except httpx.TransportError:
            return []
        return sorted(answer.json()["urls"]) if answer.status_code == 200 else []

    @property
    def all(self) -> list[str]:
        """The workers that it should list."""
        return sorted(engine.url for engine in self.engines)

    def ask(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> httpx.Response:
        """Send a request as anybody could."""
        return httpx.request(method, self.router.url + path, json=body, headers=headers, timeout=60)

    def events(self) -> list[object]:
        """Return the supervisor's events about workers."""
        path = self.directory / "events" / "router-0.jsonl"
        return [decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def restarts(self) -> list[RouterRestarted]:
        """Return how often the supervisor has restarted the router."""
        return [event for event in self.events() if isinstance(event, RouterRestarted)]

    def child(self) -> psutil.Process:
        """Return the vllm-router process."""
        return psutil.Process(self.router.pid).children()[0]


def wrong(number: int) -> dict[str, str]:
    """Return an invalid token of 300,000 bytes."""
    return {"Authorization": f"Bearer {number}{'x' * 300_000}"}


async def open_(engines: Sequence[Server]) -> None:
    """Give all engines a policy."""
    for engine in engines:
        engine.wait("/primeslurm/status")
        await EngineClient(lambda e=engine: e.url, "/models/tiny").apply(PolicyVersion(0, "/models/tiny"), 60)  # type: ignore[misc]


def routed(directory: Path, roles: Sequence[str]) -> Routed:
    """Start engines and their router, with the command lines of a plan."""
    recipe = Recipe.model_validate(recipe_data(seq_len=512))
    engines = []
    for index, role in enumerate(roles):
        command = engine_command(recipe, "cpu", role, sys.executable)  # type: ignore[arg-type]
        numbers = {name: free_port() for name in command.ports}
        values = {"host": HOST} | {f"port:{name}": str(number) for name, number in numbers.items()}
        argv = [fill(word, values) for word in (*command.argv[:2], STAND_INS["engine"], *command.argv[3:])]
        log = directory / f"engine-{index}.log"
        with log.open("w") as handle:
            process = subprocess.Popen(argv, stdout=handle, stderr=subprocess.STDOUT, start_new_session=True)
        engines.append(Server(process.pid, f"http://{HOST}:{numbers['http']}", log))
    asyncio.run(open_(engines))
    groups = [[f"e{i}" for i, role in enumerate(roles) if role == kind] for kind in ("engine", "prefill", "decode")]
    addresses = {f"e{i}": engine.url.removeprefix("http://") for i, engine in enumerate(engines)}
    command = router_command(recipe, VllmRouter(), ReplicaEngines(*groups), "router-0")
    command = command._replace(argv=(*command.argv, "--remembered-bytes", str(REMEMBERED_BYTES)))
    router = start_router(command, addresses, directory / "router.log")
    router.wait("/liveness")  # a process has no command line for a moment after its start
    arguments = psutil.Process(router.pid).cmdline()
    health = int(arguments[arguments.index("--health-port") + 1])
    return Routed(router, engines, directory, health)


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """Yield two engines that prefill and decode."""
    made = routed(tmp_path_factory.mktemp("alike"), ("engine", "engine"))
    yield made
    for server in (made.router, *made.engines):
        server.kill()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """Yield a prefill engine and two decode engines."""
    made = routed(tmp_path_factory.mktemp("apart"), ("prefill", "decode", "decode"))
    yield made
    for server in (made.router, *made.engines):
        server.kill()


GENERATE = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ATTACKS: list[tuple[str, str, object]] = [
    ("POST", "/remove_worker?url={worker}", None),
    ("DELETE", "/workers/{quoted}", None),
    ("POST", "/add_worker?url=http://127.0.0.1:1", None),
    ("POST", "/workers", {"url": "http://127.0.0.1:1"}),
    ("GET", "/list_workers", None),
    ("GET", "/workers", None),
    ("GET", "/get_loads", None),
    ("GET", "/health", None),
    ("POST", "/flush_cache", None),
    ("POST", "/inference/v1/generate", GENERATE),
    ("POST", "/v1/completions", {"model": "m", "prompt": "x"}),
    ("POST", "/v1/chat/completions", MESSAGES),
    ("POST", "/v1/responses", {"model": "m", "input": "x"}),
    ("POST", "/generate", {"text": "x"}),
    ("POST", "/pause", {}),
    ("POST", "/update_weights", {}),
    ("POST", "/primeslurm/shutdown", {}),
    ("GET", "/v1/models", None),
]


SHOWN = (None, "Bearer wrong", "Bearer", "Basic {secret}", "{secret}", "Bearer {generate}")
"""Authorization headers of strangers. `generate` is the token that routers send to prefill and decode engines."""


@pytest.mark.parametrize("shape", ["alike", "apart"])
def test_router_refuses_strangers(shape: str, request: pytest.FixtureRequest) -> None:
    it: Routed = request.getfixturevalue(shape)
    words = {
        "secret": secret.own_secret(),
        "generate": secret.generate_token(secret.own_secret()),
    }
    worker = it.engines[-1].url
    places = {"worker": worker, "quoted": worker.replace(":", "%3A").replace("/", "%2F")}
    once = httpx.Limits(max_keepalive_connections=0)  # the router may close the connection of a refused client
    with httpx.Client(base_url=it.router.url, timeout=60, limits=once) as client:
        for shown in SHOWN:
            headers = {"Authorization": shown.format(**words)} if shown else {}
            for method, path, body in ATTACKS:
                answer = client.request(method, path.format(**places), json=body, headers=headers)
                assert answer.status_code == 401, f"{shown}, {method} {path}: {answer.status_code} {answer.text[:200]}"
    assert it.workers == it.all
    assert len(tokens(generate(it.router.url, PROMPT, 2))) == 2


@pytest.mark.parametrize("shape", ["alike", "apart"])
def test_lost_workers_of_a_router_are_restored(shape: str, request: pytest.FixtureRequest) -> None:
    it: Routed = request.getfixturevalue(shape)
    count = len(it.events())
    for engine in it.engines[1:]:
        with contextlib.suppress(httpx.TransportError):  # the supervisor may restart the router after the first request
            removed = it.ask("POST", f"/remove_worker?url={engine.url}", headers=secret.header())
            assert removed.status_code == 200
    wait_until(lambda: len(it.events()) > count)
    wait_until(lambda: it.workers == it.all)
    wait_until(lambda: isinstance(it.events()[-1], RouterComplete))
    assert len(tokens(generate(it.router.url, PROMPT, 2))) == 2
    lost = [event for event in it.events()[count:] if isinstance(event, RouterIncomplete)]
    assert lost and set().union(*(event.missing for event in lost)) <= set(it.all)
    assert all(event.planned == len(it.engines) and event.process == "router-0" for event in lost)


def test_worker_outside_the_plan_is_removed(alike: Routed) -> None:
    count = len(alike.events())
    foreign = alike.engines[0].url.replace(HOST, "localhost")
    added = alike.ask("POST", f"/add_worker?url={foreign}", headers=secret.header())
    assert added.status_code == 200, added.text
    wait_until(lambda: any(isinstance(e, RouterIncomplete) and foreign in e.foreign for e in alike.events()[count:]))
    wait_until(lambda: isinstance(alike.events()[-1], RouterComplete) and alike.workers == alike.all)


def test_agent_sees_missing_workers_without_a_secret(apart: Routed) -> None:
    health = f"http://{HOST}:{apart.health}"
    for path, status in {"liveness": 200, "health": 200, "list_workers": 404}.items():
        assert httpx.get(f"{health}/{path}", timeout=60).status_code == status
    before = apart.child().pid
    os.kill(before, signal.SIGSTOP)
    with pytest.raises(httpx.TransportError):  # no response at all, so that the agent considers the router unresponsive
        httpx.get(f"{health}/liveness", timeout=30)
    os.kill(before, signal.SIGCONT)
    wait_until(lambda: apart.workers == apart.all)


def test_router_process_does_not_expose_the_secret(apart: Routed) -> None:
    run_secret = secret.own_secret()
    tokens_ = {run_secret, secret.generate_token(run_secret)}
    child = apart.child()
    for shown in (child.cmdline(), child.environ().values(), psutil.Process(apart.router.pid).cmdline()):
        assert not any(token in word for word in shown for token in tokens_)
    assert run_secret not in apart.router.log.read_text()


def test_router_and_supervisor_end_together(tmp_path: Path) -> None:
    def start(name: str) -> tuple[Server, psutil.Process]:
        recipe = Recipe.model_validate(recipe_data())
        command = router_command(recipe, VllmRouter(), ReplicaEngines(["nobody"]), name)
        (tmp_path / name).mkdir()
        router = start_router(command, {"nobody": f"{HOST}:{free_port()}"}, tmp_path / name / "log")
        child = wait_until(lambda: next(iter(psutil.Process(router.pid).children()), None))
        supervisor = psutil.Process(router.pid).cmdline()
        wait_until(lambda: child.cmdline() not in ([], supervisor))  # from then on it ends with the supervisor
        return router, child

    keeper, child = start("a")
    os.kill(keeper.pid, signal.SIGKILL)
    assert keeper.wait_gone(600)
    wait_until(lambda: OsProcess.of("child", child.pid) is None)
    keeper, child = start("b")
    child.kill()
    try:
        assert keeper.wait_gone(600)
    finally:
        keeper.kill()


def test_invalid_tokens_at_the_endpoint_do_not_restart_the_router(alike: Routed) -> None:
    before = alike.child().pid
    paths = itertools.cycle({"/key": 404, "/key/": 404, "/key/wrong": 404, "/liveness": 200}.items())
    with httpx.Client(timeout=60) as client:
        for number, (path, status) in zip(range(2 * REMEMBERED_BYTES // 300_000), paths, strict=False):
            # The endpoint closes a connection whose request takes longer than HEAD_S, as on a busy machine.
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert client.get(f"http://{HOST}:{alike.health}{path}", headers=wrong(number)).status_code == status
    # The supervisor has checked again once it has restored what is missing now.
    count = len(alike.events())
    assert alike.ask("POST", f"/remove_worker?url={alike.all[0]}", headers=secret.header()).status_code == 200
    wait_until(lambda: len(alike.events()) > count and alike.workers == alike.all)
    assert alike.child().pid == before


def test_router_restarts_after_many_invalid_tokens(alike: Routed) -> None:
    """The router caches every token, and the supervisor counts them."""
    before, count = alike.child().pid, len(alike.restarts())
    with httpx.Client(timeout=60) as client:
        for number in range(2 * REMEMBERED_BYTES // 300_000):
            try:
                answer = client.get(f"{alike.router.url}/liveness", headers=wrong(number))
            except httpx.TransportError:
                break
            assert answer.status_code == 401
    wait_until(lambda: [child.pid for child in psutil.Process(alike.router.pid).children()] not in ([], [before]))
    wait_until(lambda: alike.workers == alike.all)
    (event,) = alike.restarts()[count:]
    assert event.process == "router-0" and "MiB of invalid tokens" in event.reason
