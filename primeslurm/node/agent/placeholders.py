"""Fill the placeholders of a Plan with what only the nodes know: addresses, ports, directories."""

from __future__ import annotations

import re
from collections.abc import Mapping

from primeslurm.wire.addresses import Addresses

_PLACEHOLDER = re.compile(r"\$\{([a-z_]+)(?::([^:}]+))?(?::([^:}]+))?\}")


class UnknownPlaceholder(KeyError):
    """A Plan names a process, port or value that does not exist."""


def resolve(text: str, process: str, addresses: Addresses, values: Mapping[str, str]) -> str:
    """Replace every placeholder of `text`, seen from `process`.

    `${host}`, `${host:NAME}`, `${port:http}`, `${port:http-3}` (that port minus three), `${port:NAME:http}`,
    `${addr:NAME:http}`; anything else of the form `${word}` must be in `values`.

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
