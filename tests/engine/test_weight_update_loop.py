"""The weight update loop with real engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from primeslurm.orchestrator.weight_updates.engine_client import (
    EngineClient,
    EngineDownError,
    EngineUpdateError,
    PolicyVersion,
)
from primeslurm.orchestrator.weight_updates.weight_update_loop import WeightUpdateLoop
from primeslurm.records.journal import Journal
from tests.engine.conftest import ConnectEngine, StartEngine
from tests.support.generate import generate, spans
from tests.support.models import make_model, publish
from tests.support.processes import Server
from tests.support.waiting import wait_until_async

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [2, 5, 9, 14]


@contextlib.asynccontextmanager
async def running(loop: WeightUpdateLoop) -> AsyncIterator[WeightUpdateLoop]:
    task = asyncio.create_task(loop.run())
    yield loop
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def reaches(loop: WeightUpdateLoop, name: str, state: str) -> None:
    await wait_until_async(lambda: loop.pool.report()[name].state == state, loop.pool.report)


def port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


async def test_engines_reach_and_keep_the_wanted_policy_or_are_ended(
    start_engine: StartEngine, client: ConnectEngine, model: Path, tmp_path: Path
) -> None:
    servers = {"a": start_engine(), "b": start_engine()}
    second = PolicyVersion(2, str(publish(make_model(tmp_path / "m2", seed=2), tmp_path, 2)))
    hooks: list[tuple[str, int]] = []

    async def before(version: int) -> None:
        if version == 1:  # no engine has been updated yet
            assert [spans(generate(s.url, PROMPT, 1)) for s in servers.values()] == [[(0, 0, 1)]] * 2
        hooks.append(("before", version))

    async def after(version: int) -> None:
        hooks.append(("after", version))

    engines = {name: client(server) for name, server in servers.items()}
    journal = Journal(tmp_path, "orchestrator")
    async with running(
        WeightUpdateLoop(engines, journal, 30, poll_s=0.2, before_update=before, after_update=after)
    ) as loop:
        await loop.want(PolicyVersion(0, str(model)))
        await loop.wait_for(0, timeout_s=600)
        for name in servers:
            await reaches(loop, name, "CURRENT")
        first = PolicyVersion(1, str(publish(make_model(tmp_path / "m1", seed=1), tmp_path, 1)))
        await loop.want(first)
        await loop.want(first)  # a repetition has no effect
        await loop.wait_for(1, timeout_s=600)
        assert [spans(generate(s.url, PROMPT, 1)) for s in servers.values()] == [[(1, 0, 1)]] * 2
        assert hooks == [("before", 0), ("after", 0), ("before", 1), ("after", 1)]

        servers["b"].kill()
        await reaches(loop, "b", "DOWN")
        await loop.want(second)
        await loop.wait_for(2, timeout_s=600)  # the dead engine delays nobody
        servers["b"] = start_engine(http=port(servers["b"]))
        await reaches(loop, "b", "CURRENT")
        assert spans(generate(servers["b"].url, PROMPT, 1)) == [(2, 0, 1)]
    events = (tmp_path / "events" / "orchestrator.jsonl").read_text()
    assert events.count('"engine_updated"') == 6  # two at 0, two at 1, a at 2, b at 2

    async with running(WeightUpdateLoop({"b": client(servers["b"])}, Journal(tmp_path, "o"), 30, poll_s=0.2)) as loop:
        await loop.want(second)
        await loop.wait_for(2, timeout_s=600)
        # The engine refuses another version at once. It would wait for a directory that it does not see yet.
        mislabelled = publish(model, tmp_path, 4)
        await loop.want(PolicyVersion(3, str(mislabelled)))
        assert await asyncio.to_thread(servers["b"].wait_gone, 600)
        await reaches(loop, "b", "DOWN")
        with pytest.raises(TimeoutError):
            await loop.wait_for(3, timeout_s=0.5)
        assert loop.current_version == 2

    await check_that_the_update_of_a_hanging_engine_times_out(servers["a"], client, model, tmp_path)


async def check_that_the_update_of_a_hanging_engine_times_out(
    server: Server, client: ConnectEngine, model: Path, tmp_path: Path
) -> None:
    control = client(server)
    core = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()[0])
    os.kill(core, signal.SIGSTOP)  # the engine core hangs, its HTTP server answers
    policy = PolicyVersion(5, str(publish(model, tmp_path, 5)))
    with pytest.raises(EngineUpdateError, match="took longer than 1 s"):
        await control.apply(policy, timeout_s=1)
    os.kill(server.pid, signal.SIGSTOP)  # nothing answers
    with pytest.raises(EngineDownError):
        await EngineClient(lambda: server.url, str(model), status_timeout_s=0.5).status()
    os.kill(server.pid, signal.SIGCONT)
    os.kill(core, signal.SIGCONT)
