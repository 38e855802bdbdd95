"""Ports of a run that are still in use."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from primeslurm.base.files import read_json
from primeslurm.run.directory import RunDirectory

_LISTENS = "0A"


def listening() -> set[tuple[str, int]]:
    """Return all IPv4 addresses and TCP ports of this machine on which a process listens."""
    addresses = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENS:
            host, _, port = fields[1].partition(":")
            address = ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(host), "little"))
            addresses.add((str(address), int(port, 16)))
    return addresses


def ports_left(run: RunDirectory) -> list[str]:
    """Return ports of the run's processes on which a process still listens."""
    open_now, problems = listening(), set()
    for attempt in run.attempts():
        published = read_json(attempt.addresses_file) or {"hosts": {}, "ports": {}}
        for name, ports in published["ports"].items():
            for port in ports.values():
                if (published["hosts"][name], port) in open_now:
                    problems.add(f"port {port} of {published['hosts'][name]} is still listened on ({name})")
    return sorted(problems)
