"""Ports that agents claim before anybody listens there."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from primeslurm.node.host import network
from primeslurm.node.host.network import NetworkError, Ports

ADDRESS = "127.0.3.7"
FIRST = 21800
CLAIMS = (
    f"from primeslurm.node.host.network import Ports; p = Ports({ADDRESS!r}); "
    f"print(p.claim({FIRST}), flush=True); input()"
)


def test_agents_that_start_at_once_claim_different_ports() -> None:
    agents = [subprocess.Popen([sys.executable, "-c", CLAIMS], stdin=-1, stdout=-1, text=True) for _ in range(3)]
    claimed = {int(agent.stdout.readline()) for agent in agents if agent.stdout}
    assert claimed == {FIRST, FIRST + 1, FIRST + 2}
    for agent in agents:
        agent.kill()  # claims end with who made them, however it ends
        agent.communicate()
    assert Ports(ADDRESS).claim(FIRST) == FIRST


def test_ports_are_given_back() -> None:
    first, second = Ports(ADDRESS), Ports(ADDRESS)
    assert [first.claim(FIRST), first.claim(FIRST), second.claim(FIRST)] == [FIRST, FIRST + 1, FIRST + 2]
    first.release()
    assert second.claim(FIRST) == FIRST


def test_ports_of_other_addresses_are_not_in_the_way() -> None:
    ports, others = Ports(ADDRESS), Ports("127.0.3.8")
    assert ports.claim(FIRST) == others.claim(FIRST) == FIRST


def test_a_port_where_somebody_listens_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_SEARCH", 1)
    with socket.create_server((ADDRESS, FIRST)), pytest.raises(NetworkError, match=f"no free port on {ADDRESS} from"):
        Ports(ADDRESS).claim(FIRST)
