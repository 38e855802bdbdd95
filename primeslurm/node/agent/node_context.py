"""Node-specific inputs of processes: values of the Plan's placeholders, files, and directories on the local disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from primeslurm.base.private_directory import LONGEST_FOR_SOCKETS, WORD, PrivateDirectory, is_abandoned
from primeslurm.node.host import fabric
from primeslurm.plan.model import Node, Plan, Process
from primeslurm.wire.transport.addresses import Addresses

RUN_ID_END = 9  # the last letters of a run's id, which no other run has. Directory names contain at least these.
LONGEST_RUN_ID = 38  # longest part of a run's id in a directory name
_OF_ATTEMPT = re.compile(rf"\.?(primeslurm-.+)-(\d+)-a(\d+)(?:-[a-z2-7]{{{WORD}}})?")
_PLACEHOLDER = re.compile(r"\$\{([a-z_]+)(?::([^:}]+))?(?::([^:}]+))?\}")


class NodeContext:
    """Facts about one node of the Plan that are only known on its machine.

    `values` has the placeholders with the same value for all processes (`plan.model`).
    """

    def __init__(self, plan: Plan, node: Node, address: str, values: Mapping[str, str]) -> None:
        self._node = node
        self._hcas = fabric.find_hcas(plan.hcas)
        self._gpus = fabric.find_gpus()
        interface = plan.interface or fabric.interface_of(address, fabric.own_interfaces())
        self._values = {**values, "node": str(node.index), **fabric.placeholders(self._hcas, interface)}
        self._scratch: list[PrivateDirectory] = []

    def values(self, process: Process) -> dict[str, str]:
        """Return the values of all placeholders for one process, addresses excepted."""
        gpus = [self._gpus[gpu] for gpu in process.gpus if gpu < len(self._gpus)]
        near = fabric.placeholders(fabric.nearest(self._hcas, gpus), self._values["interface"])
        return {**self._values, "ucx_devices_near": near["ucx_devices"]}

    @property
    def scratch(self) -> list[Path]:
        return [directory.path for directory in self._scratch]

    def make_scratch(self) -> None:
        """Make the scratch directories of all processes, and remove those of killed attempts. Raises OSError."""
        for text in sorted({text for process in self._node.processes for text in process.scratch}):
            directory = Path(self._resolved(text, self._values["key"]))
            earlier = Path(self._resolved(text, "?" * WORD))
            # An agent that was killed while it made its directory has left it under the hidden name.
            hidden = earlier.with_name(f".{earlier.name}")
            for left in (directory, *earlier.parent.glob(earlier.name), *earlier.parent.glob(hidden.name)):
                if is_abandoned(left):
                    shutil.rmtree(left, ignore_errors=True)
            self._scratch.append(made := PrivateDirectory(directory))
            made.make()

    def remove_scratch(self) -> None:
        for directory in self._scratch:
            directory.remove()

    def write(self, files: Mapping[str, str]) -> None:
        """Write files of a process, name to text. Raises OSError."""
        for name, text in files.items():
            (Path(self._values["tmp"]) / name).write_bytes(text.encode(errors="surrogateescape"))

    def _resolved(self, text: str, key: str) -> str:
        return resolve(text, "", Addresses(hosts={}, ports={}), {**self._values, "key": key})


def directory_of(parent: Path, run_id: str, attempt: int, rank: int, key: str) -> Path:
    """Return the path of an agent's local directory, short enough for the paths of sockets in it.

    `key` is a random word, so that nobody else can make the directory first.
    """
    # The longest numbers, so that the name contains the same part of the id in all attempts.
    room = LONGEST_FOR_SOCKETS - len(os.fsencode(parent / f"primeslurm--99-a9999-{key}"))
    letters = min(max(room, RUN_ID_END), LONGEST_RUN_ID)
    return parent / f"primeslurm-{run_id[-letters:]}-{attempt}-a{rank}-{key}"


def remove_leftovers(directory: Path) -> None:
    """Remove the directories that killed agents of the same run have left: of earlier attempts, or of this rank.

    `directory` is the agent's own, named by `directory_of`.
    """
    match = _OF_ATTEMPT.fullmatch(directory.name)
    if match is None or not directory.parent.is_dir():
        return
    for other in directory.parent.iterdir():
        other_match = _OF_ATTEMPT.fullmatch(other.name)
        if other_match is None or other_match[1] != match[1]:
            continue
        if (int(other_match[2]) < int(match[2]) or other_match.groups() == match.groups()) and is_abandoned(other):
            shutil.rmtree(other, ignore_errors=True)


def resolve(text: str, process: str, addresses: Addresses, values: Mapping[str, str]) -> str:
    """Replace the placeholders in a text of the Plan that belongs to `process`.

    The placeholders are `${host}`, `${host:NAME}`, `${port:http}`, `${port:http-3}` (that port minus three),
    `${port:NAME:http}`, `${addr:NAME:http}`, and `${word}` for each word in `values`.

    Raises:
        KeyError: the text names something that does not exist.
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
            raise KeyError(f"{match[0]} in {process}") from None

    return _PLACEHOLDER.sub(fill, text)
