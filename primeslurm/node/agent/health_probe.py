"""Polls a local server in the background, so that an unresponsive server never blocks its agent."""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass

PERIOD_S = 1.0
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ProbeTarget:
    """A server to poll: `ready_path` answers 200 once it is up, and `/health` while it serves."""

    host: str
    port: int
    ready_path: str


def status_of(host: str, port: int, path: str, timeout_s: float = TIMEOUT_S) -> int | None:
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class HealthProbe:
    """Polls one server every second until stopped."""

    core_unresponsive = False

    def __init__(self, target: ProbeTarget, timeout_s: float = TIMEOUT_S) -> None:
        self.ready = False
        self.healthy = False
        # Any answer counts except 504, which an engine's server gives when its engine core does not respond. An engine
        # with an old policy answers 503, and is responsive.
        self.answers = 0
        self._target = target
        self._timeout_s = timeout_s
        self._stop = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Stop polling. The server counts as neither ready nor healthy from now on."""
        self._stop.set()
        self.ready = self.healthy = False

    def _run(self) -> None:
        path = self._target.ready_path
        while not self._stop.is_set():
            started = time.monotonic()
            status = self._ask(path)
            self.core_unresponsive = status == http.client.GATEWAY_TIMEOUT
            if status is not None and not self.core_unresponsive:
                self.answers += 1
            ready = status == 200
            healthy = ready if path == "/health" else ready and self._ask("/health") == 200
            if not self._stop.is_set():
                self.healthy, self.ready = healthy, ready  # in this order: a ready server has been asked
            self._stop.wait(max(0.0, PERIOD_S - (time.monotonic() - started)))

    def _ask(self, path: str) -> int | None:
        return status_of(self._target.host, self._target.port, path, self._timeout_s)
