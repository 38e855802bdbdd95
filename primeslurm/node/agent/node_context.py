"""What processes find on their node: values for the Plan's placeholders, their files, and directories on its disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from primeslurm.node.host import fabric
from primeslurm.node.host.private_directory import LONGEST_FOR_SOCKETS, WORD, PrivateDirectory, is_abandoned
from primeslurm.plan.model import Node, Plan, Process
from primeslurm.wire.transport.addresses import Addresses

RUN_ID_END = 9
"""Letters of a run's id that no other run has: names of directories have them all, and more where there is room."""
LONGEST_RUN_ID = 38
"""Letters of a run's id in names of directories, at most."""
_OF_ATTEMPT = re.compile(rf"\.?(primeslurm-.+)-(\d+)-a(\d+)(?:-[a-z2-7]{{{WORD}}})?")
_PLACEHOLDER = re.compile(r"\$\{([a-z_]+)(?::([^:}]+))?(?::([^:}]+))?\}")


class NodeContext:
    """Everything about one node of the Plan that is known only on the machine that runs it.

    Args:
        plan: the whole.
        node: this node's part of it.
        address: the node's own.
        values: placeholders that hold for every node (`plan.model`).
    """

    def __init__(self, plan: Plan, node: Node, address: str, values: Mapping[str, str]) -> None:
        self._node = node
        self._hcas = fabric.find_hcas(plan.hcas)
        self._gpus = fabric.find_gpus()
        interface = plan.interface or fabric.interface_of(address, fabric.own_interfaces())
        self._values = {**values, "node": str(node.index), **fabric.placeholders(self._hcas, interface)}
        self._scratch: list[PrivateDirectory] = []

    def values(self, process: Process) -> dict[str, str]:
        """Return the values of all placeholders that are no addresses, for one process."""
        gpus = [self._gpus[gpu] for gpu in process.gpus if gpu < len(self._gpus)]
        near = fabric.placeholders(fabric.nearest(self._hcas, gpus), self._values["interface"])
        return {**self._values, "ucx_devices_near": near["ucx_devices"]}

    @property
    def scratch(self) -> list[Path]:
        """Directories that were made on the node's disk."""
        return [directory.path for directory in self._scratch]

    def make_scratch(self) -> None:
        """Make every directory that a process wants on the node's disk, empty.

        Raises:
            OSError: one cannot be made.
        """
        for text in sorted({text for process in self._node.processes for text in process.scratch}):
            directory = Path(self._resolved(text, self._values["key"]))
            earlier = Path(self._resolved(text, "?" * WORD))
            hidden = earlier.with_name(f".{earlier.name}")  # who made it was killed before it had its name
            for left in (directory, *earlier.parent.glob(earlier.name), *earlier.parent.glob(hidden.name)):
                if is_abandoned(left):
                    shutil.rmtree(left, ignore_errors=True)
            self._scratch.append(made := PrivateDirectory(directory))
            made.make()

    def remove_scratch(self) -> None:
        """Remove these directories, if they are there."""
        for directory in self._scratch:
            directory.remove()

    def write(self, files: Mapping[str, str]) -> None:
        """Write files of a process, name to text.

        Raises:
            OSError: one cannot be written.
        """
        for name, text in files.items():
            (Path(self._values["tmp"]) / name).write_bytes(text.encode(errors="surrogateescape"))

    def _resolved(self, text: str, key: str) -> str:
        return resolve(text, "", Addresses(hosts={}, ports={}), {**self._values, "key": key})


def directory_of(parent: Path, run_id: str, attempt: int, rank: int, key: str) -> Path:
    """Name an agent's directory on its node's disk, so shortly that sockets below it can be made.

    Args:
        parent: where it is to be.
        run_id: the run's unique id.
        attempt: number of the attempt.
        rank: the agent's.
        key: a random word, so that nobody else can make it beforehand.
    """
    room = LONGEST_FOR_SOCKETS - len(os.fsencode(parent / f"primeslurm--99-a9999-{key}"))  # alike in all attempts
    letters = min(max(room, RUN_ID_END), LONGEST_RUN_ID)
    return parent / f"primeslurm-{run_id[-letters:]}-{attempt}-a{rank}-{key}"


def remove_of_earlier_attempts(directory: Path) -> None:
    """Remove what killed agents have left: of earlier attempts of the run, or in the place of this one.

    One that was killed while it made its directory has left it hidden.

    Args:
        directory: an agent's, as `directory_of` names it.
    """
    own = _OF_ATTEMPT.fullmatch(directory.name)
    if own is None or not directory.parent.is_dir():
        return
    for other in directory.parent.iterdir():
        found = _OF_ATTEMPT.fullmatch(other.name)
        if found is None or found[1] != own[1]:
            continue
        if (int(found[2]) < int(own[2]) or found.groups() == own.groups()) and is_abandoned(other):
            shutil.rmtree(other, ignore_errors=True)


class UnknownPlaceholder(KeyError):
    """A Plan names a process, port or value that does not exist."""


def resolve(text: str, process: str, addresses: Addresses, values: Mapping[str, str]) -> str:
    """Replace every placeholder of `text`, seen from `process`.

    `${host}`, `${host:NAME}`, `${port:http}`, `${port:http-3}` (that port minus three), `${port:NAME:http}`,
    `${addr:NAME:http}`; anything else of the form `${word}` must be in `values`.

    Args:
        text: of a Plan.
        process: name of the process that it belongs to.
        addresses: hosts and ports of all processes.
        values: placeholders that are no addresses.

    Returns:
        The text with nothing left to fill in.

    Raises:
        UnknownPlaceholder: something is named that does not exist.
    """

    def fill(match: re.Match[str]) -> str:
        word, first, second = match.groups()
        try:
            if word == "host":
                return addresses.hosts[first or process]
            if word == "port":
                owner, port = (first, second) if second else (process, first)
                port, _, less = port.partition("-")
                return str(addresses.ports[owner][port] - int(less or 0))
            if word == "addr":
                return f"{addresses.hosts[first]}:{addresses.ports[first][second]}"
            return values[word]
        except KeyError:
            raise UnknownPlaceholder(f"{match[0]} in {process}") from None

    return _PLACEHOLDER.sub(fill, text)
