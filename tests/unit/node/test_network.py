"""Claims of ports, and the address of a node."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primeslurm.node.agent.process_manager import ProcessManager
from primeslurm.node.host import network
from primeslurm.node.host.network import NetworkError, Ports, own_address
from primeslurm.plan.model import Plan, Process
from primeslurm.records.events.nodes import PortTaken
from primeslurm.records.fleet import FleetView
from primeslurm.records.journal import Journal
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.history import events as all_events
from primeslurm.wire.transport.addresses import Addresses
from tests.support.plans import SERVER, plan_of, python
from tests.support.strangers import needs_second_user, stranger
from tests.support.waiting import wait_until

ADDRESS = "127.0.3.7"
FIRST = 21800
CLAIMS = (
    f"from primeslurm.node.host.network import Ports; p = Ports({ADDRESS!r}); "
    f"print(p.claim({FIRST}), flush=True); input()"
)


def test_concurrent_agents_claim_different_ports() -> None:
    agents = [subprocess.Popen([sys.executable, "-c", CLAIMS], stdin=-1, stdout=-1, text=True) for _ in range(3)]
    claimed = {int(agent.stdout.readline()) for agent in agents if agent.stdout}
    assert claimed == {FIRST, FIRST + 1, FIRST + 2}
    for agent in agents:
        agent.kill()  # a claim ends with its process, however that ends
        agent.communicate()
    assert Ports(ADDRESS).claim(FIRST) == FIRST


def test_released_ports_can_be_claimed() -> None:
    first, second = Ports(ADDRESS), Ports(ADDRESS)
    assert [first.claim(FIRST), first.claim(FIRST), second.claim(FIRST)] == [FIRST, FIRST + 1, FIRST + 2]
    first.release()
    assert second.claim(FIRST) == FIRST


def test_addresses_have_separate_ports() -> None:
    ports, others = Ports(ADDRESS), Ports("127.0.3.8")
    assert ports.claim(FIRST) == others.claim(FIRST) == FIRST


def test_a_port_in_use_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_TRIES", 1)
    monkeypatch.setattr(network, "_ELSEWHERE", range(FIRST, FIRST + 1))
    with socket.create_server((ADDRESS, FIRST)), pytest.raises(NetworkError, match=f"no free port on {ADDRESS} from"):
        Ports(ADDRESS).claim(FIRST)


HELD: list[socket.socket] = []
"""What a stranger holds on to."""


def claim_all() -> None:
    for port in range(FIRST, FIRST + network._TRIES):
        HELD.append(socket.socket(socket.AF_UNIX))
        HELD[-1].bind(f"\0primeslurm {ADDRESS}:{port}")


def listen_on_all() -> None:
    for port in range(FIRST, FIRST + network._TRIES):
        HELD.append(socket.create_server(("0.0.0.0" if port % 2 else ADDRESS, port)))


@needs_second_user
@pytest.mark.parametrize("attack", [claim_all, listen_on_all])
def test_another_user_who_takes_the_next_ports_does_not_stop_a_run(attack: Callable[[], None]) -> None:
    with stranger(attack) as done:
        assert done.succeeded, done.trace
        ports = Ports(ADDRESS)
        first, second = ports.claim(FIRST), ports.claim(FIRST)
        assert first != second and {first, second} <= set(network._ELSEWHERE)


@needs_second_user
def test_claims_of_another_user_on_all_ports_do_not_stop_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_ELSEWHERE", range(FIRST, FIRST + 2))
    with stranger(claim_all) as done:
        assert done.succeeded, done.trace
        ports = Ports(ADDRESS)
        assert {ports.claim(FIRST), ports.claim(FIRST)} == {FIRST, FIRST + 1}
        with pytest.raises(NetworkError, match="nor elsewhere"):
            ports.claim(FIRST)


def listen(address: str, port: int, **options: Any) -> None:
    HELD.append(socket.create_server((address, port), **options))


def test_a_kernel_without_ipv6_has_one_table_of_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this case, the missing table would end the agent once one of its ports is taken."""
    monkeypatch.setattr(network, "_TCP6", tmp_path / "tcp6")
    ports = Ports(ADDRESS)
    port = ports.claim(FIRST)
    with socket.create_server((ADDRESS, port)):
        assert network._listeners(ADDRESS, port) == {os.geteuid()}
        assert not ports.is_lost(port)
    ports.release()


@needs_second_user
def test_a_port_is_lost_to_another_user_only() -> None:
    ports = Ports(ADDRESS)
    port = ports.claim(FIRST)
    assert not ports.is_lost(port)
    with socket.create_server((ADDRESS, port)):
        assert not ports.is_lost(port)
    everywhere = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    for address, options in ((ADDRESS, {}), ("0.0.0.0", {}), ("::", everywhere)):
        with stranger(functools.partial(listen, address, port, **options)) as done:
            assert done.succeeded and ports.is_lost(port), address
    ports.release()


def prepared(plan: Plan) -> tuple[Attempt, Journal]:
    attempt = RunDirectory(Path(plan.run_dir)).attempt(1)
    attempt.prepare(plan)
    return attempt, Journal(attempt.path, "agent-0")


@needs_second_user
def test_a_server_whose_port_was_taken_starts_on_another(tmp_path: Path) -> None:
    argv = python(SERVER, "${host}", "${port:http}")
    server = Process(name="server", role="engine", node=0, argv=argv, ports={"http": FIRST}, log="logs/server.log")
    plan = plan_of(tmp_path / "run", (server,))
    attempt, journal = prepared(plan)
    values = {"run_dir": str(tmp_path / "run"), "tmp": str(tmp_path), "key": "abcdef"}
    manager = ProcessManager(plan, plan.nodes[0], attempt, ADDRESS, values, journal)
    first = manager.ports["server"]["http"]
    hosts = {"server": ADDRESS}
    with stranger(functools.partial(listen, ADDRESS, first)) as done:
        assert done.succeeded, done.trace
        before = Addresses(hosts=hosts, ports={"server": {"http": first}})
        manager.tick(0.0, FleetView(time=0.0), before)
        assert not manager.children and not manager.has_published(before), "the new port must be published first"
        other = manager.ports["server"]["http"]
        assert other != first
        manager.tick(0.0, FleetView(time=0.0), Addresses(hosts=hosts, ports={"server": {"http": other}}))
        try:
            wait_until(lambda: not network.can_bind(ADDRESS, other))
        finally:
            manager.kill()
            manager.close()
    told = [event for event in all_events(RunDirectory(tmp_path / "run")) if isinstance(event, PortTaken)]
    assert [(event.name, event.port, event.instead) for event in told] == [("server", first, other)]


def test_a_name_that_does_not_resolve_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", fail)
    with pytest.raises(NetworkError) as caught:
        own_address("n1", None, {})
    assert str(caught.value) == (
        "the name n1 does not resolve (Name or service not known); give the nodes' addresses in network.addresses of "
        "the site file, or an interface in network.interface"
    )


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", "0.0.0.0", "169.254.7.9", "224.0.0.1"])
def test_an_unreachable_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, [], [address]))
    with pytest.raises(NetworkError, match=f"node1 resolves to {address} on this node, which no other node can reach"):
        network.own_address("node1", None, {})
    assert network.own_address("node1", None, {"node1": address}) == address, "the table of the site takes precedence"


def test_the_first_reachable_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, [], ["127.0.1.1", "10.0.0.7", "10.1.0.7"]))
    assert network.own_address("node1", None, {}) == "10.0.0.7"
    assert network.own_address("node1", None, {}, True) == "127.0.1.1", "a job of one node may use its loopback"


def test_the_loopback_interface_is_refused() -> None:
    with pytest.raises(NetworkError, match=r"interface lo has the address 127\.0\.0\.1, which no other node can reach"):
        network.own_address("node1", "lo", {})
    assert network.own_address("node1", "lo", {}, True) == "127.0.0.1"


def test_a_fixed_port_is_claimed_or_refused_but_never_replaced() -> None:
    ports, others = Ports(ADDRESS), Ports("127.0.3.8")
    assert ports.claim(FIRST, fixed=True) == FIRST
    with socket.create_server((ADDRESS, FIRST)):
        assert others.claim(FIRST, fixed=True) == FIRST, "another node of an emulated cluster has the port, too"
        with pytest.raises(NetworkError, match=f"port {FIRST} of {ADDRESS} is in use, and the recipe fixes it"):
            Ports(ADDRESS).claim(FIRST, fixed=True)
    ports.release()
    others.release()


def test_no_other_process_gets_a_fixed_port(tmp_path: Path) -> None:
    """Not of a process that comes later, nor of another agent of the machine."""
    free = Process(name="a", role="router", node=0, argv=("x",), ports={"http": FIRST}, log="a.log")
    fixed = {"ports": {"http": FIRST + 1}, "fixed_ports": ("http",), "argv": ("x",), "role": "engine", "log": "b.log"}
    nodes = (free, Process(name="b", node=0, **fixed)), (Process(name="c", node=1, **fixed),)
    plan = plan_of(tmp_path / "run", *nodes)
    attempt, journal = prepared(plan)
    with socket.create_server((ADDRESS, FIRST)):
        for node in (plan.nodes[0], plan.nodes[0].model_copy(update={"processes": (free,)})):
            manager = ProcessManager(plan, node, attempt, ADDRESS, {"key": "k"}, journal)
            assert manager.ports["a"] == {"http": FIRST + 2}
            manager.close()


def test_an_agent_starts_no_process_whose_fixed_port_is_in_use(tmp_path: Path) -> None:
    ports = {"http": FIRST, "metrics": FIRST}
    server = Process(name="s", role="engine", node=0, argv=("x",), ports=ports, fixed_ports=("http",), log="logs/s.log")
    plan = plan_of(tmp_path / "run", (server,))
    attempt, journal = prepared(plan)
    arguments = (plan, plan.nodes[0], attempt, ADDRESS, {"key": "k"}, journal)
    with socket.create_server((ADDRESS, FIRST)), pytest.raises(NetworkError, match=f"port {FIRST} of .* is in use"):
        ProcessManager(*arguments)
    manager = ProcessManager(*arguments)
    assert manager.ports["s"] == {"http": FIRST, "metrics": FIRST + 1}
    manager.close()
