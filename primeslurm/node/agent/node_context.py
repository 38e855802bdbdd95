"""What processes find on their node: values for the Plan's placeholders, their files, and directories on its disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from primeslurm.node.host import fabric
from primeslurm.plan.model import Node, Plan, Process
from primeslurm.wire.addresses import Addresses

_OF_ATTEMPT = re.compile(r"(primeslurm-.+)-(\d+)-a\d+")
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

    def values(self, process: Process) -> dict[str, str]:
        """Return the values of all placeholders that are no addresses, for one process."""
        gpus = [self._gpus[gpu] for gpu in process.gpus if gpu < len(self._gpus)]
        near = fabric.placeholders(fabric.nearest(self._hcas, gpus), "")
        return {**self._values, "ucx_devices_near": near["ucx_devices"]}

    def make_scratch(self) -> None:
        """Make every directory that a process wants on the node's disk, empty.

        Raises:
            OSError: one cannot be made.
        """
        self.remove_scratch()  # left behind by an agent that was killed
        for directory in self._scratch():
            directory.mkdir(parents=True, mode=0o700)

    def remove_scratch(self) -> None:
        """Remove these directories, if they are there."""
        for directory in self._scratch():
            shutil.rmtree(directory, ignore_errors=True)

    def write(self, files: Mapping[str, str]) -> None:
        """Write files of a process, name to text.

        Raises:
            OSError: one cannot be written.
        """
        for name, text in files.items():
            (Path(self._values["tmp"]) / name).write_text(text)

    def _scratch(self) -> list[Path]:
        nowhere = Addresses(hosts={}, ports={})
        texts = {text for process in self._node.processes for text in process.scratch}
        return [Path(resolve(text, "", nowhere, self._values)) for text in sorted(texts)]


def remove_of_earlier_attempts(directory: Path) -> None:
    """Remove what agents that were killed in earlier attempts of the run have left beside a directory of this one.

    Args:
        directory: an agent's, named primeslurm-RUN-ATTEMPT-aRANK.
    """
    own = _OF_ATTEMPT.fullmatch(directory.name)
    if own is None or not directory.parent.is_dir():
        return
    for other in directory.parent.iterdir():
        found = _OF_ATTEMPT.fullmatch(other.name)
        if found and found[1] == own[1] and int(found[2]) < int(own[2]):
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
