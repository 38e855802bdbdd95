"""When a router is started anew. Its keeper's clock is set by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.inference.router import supervisor
from primeslurm.inference.router.health_endpoint import RouterHealthEndpoint
from primeslurm.inference.router.supervisor import FORGET_AGAIN_S, REMEMBERED_BYTES, Address, RouterSupervisor
from primeslurm.records.journal import Journal


@pytest.fixture(autouse=True)
def secret_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper takes the secret out of the environment, which other tests need."""
    monkeypatch.setattr(supervisor.secret, "keep", lambda: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    return now


async def silent(*_: object) -> None:
    """A router that does not answer."""


async def test_wrong_tokens_start_a_router_anew_now_and_then(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RouterSupervisor, "_ask", silent)
    kept = RouterSupervisor([], Address("x", 1), Address("x", 2), Journal(tmp_path, "router-0"))
    door = RouterHealthEndpoint("secret", silent, lambda: True)
    assert not await kept._round(door)
    door.refused_bytes = REMEMBERED_BYTES + 1
    assert "wrong tokens" in await kept._round(door)
    clock[0] += FORGET_AGAIN_S
    assert not await kept._round(door)
    clock[0] += 1
    assert await kept._round(door)


async def test_only_who_knows_the_path_has_tokens_judged() -> None:
    door = RouterHealthEndpoint("secret", silent, lambda: True)
    other = RouterHealthEndpoint("secret", silent, lambda: True)
    for path in ("/key", "/key/", other.keys, door.keys + "/", door.keys[:-1], "/key/\xff"):
        assert await door.status(path, b"Bearer secret") == 404 == await door.status(path, b"x" * 10**6)
    assert door.refused_bytes == 0
    assert await door.status(door.keys, b"Bearer secret") == 200
    assert await door.status(door.keys, b"Bearer wrong") == 401 and door.refused_bytes > 0
