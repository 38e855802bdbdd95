"""Does a local server answer? Probed in the background, so that a hanging server never holds up its agent."""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass

PERIOD_S = 1.0
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Target:
    """One server to probe: `ready_path` says that it is up, `/health` that it serves."""

    host: str
    port: int
    ready_path: str


def answers(host: str, port: int, path: str) -> bool:
    """Whether GET `path` gives 200."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Probe:
    """Probes one target each second until stopped."""

    def __init__(self, target: Target) -> None:
        self.ready = False
        self.healthy = False
        self._target = target
        self._stop = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Stop probing; both answers become False."""
        self._stop.set()
        self.ready = self.healthy = False

    def _run(self) -> None:
        target = self._target
        while not self._stop.is_set():
            started = time.monotonic()
            ready = answers(target.host, target.port, target.ready_path)
            same = target.ready_path == "/health"
            healthy = ready if same else ready and answers(target.host, target.port, "/health")
            if not self._stop.is_set():
                self.ready, self.healthy = ready, healthy
            self._stop.wait(max(0.0, PERIOD_S - (time.monotonic() - started)))
