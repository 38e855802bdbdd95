"""The service for the Tinker API."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from primeslurm.base.paths import expanded
from primeslurm.tinker.server import TinkerServer, prepare


def tinker_server(
    host: str, port: int, data: Path, users: Sequence[str] = (), engines: Sequence[str] = ()
) -> TinkerServer:
    """Return a service with an open port. Its `serve` loads the model and answers until it is interrupted.

    Args:
        host: address or name of this machine to listen on.
        port: port to listen on. 0: any free one.
        data: directory for API keys and checkpoints. It is created if it does not exist.
        users: names of users besides the first one. Each has its own key, runs and checkpoints.
        engines: URLs of vLLM engines that sample, or of their routers. They have the model that the service loads, and
            name adapters by their path. None: the service samples with the model that it trains.

    Raises:
        UsageError: the port, the directory or an engine's URL cannot be used.
    """
    return prepare(host, port, expanded(data).absolute(), users, engines)
