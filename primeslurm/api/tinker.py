"""The service for the Tinker API."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from primeslurm.base.paths import expanded
from primeslurm.tinker.server import TinkerServer, prepare


def tinker_server(host: str, port: int, data: Path, users: Sequence[str] = ()) -> TinkerServer:
    """Return a service with an open port. Its `serve` loads the model and answers until it is interrupted.

    Args:
        host: address or name of this machine to listen on.
        port: port to listen on. 0: any free one.
        data: directory for API keys and checkpoints. It is created if it does not exist.
        users: names of users besides the first one. Each has its own key, runs and checkpoints.

    Raises:
        UsageError: the port or the directory cannot be used.
    """
    return prepare(host, port, expanded(data).absolute(), users)
