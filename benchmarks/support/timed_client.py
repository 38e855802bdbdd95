"""A client of an engine that records when each part of a weight update began and ended."""

from __future__ import annotations

import time
from typing import Any

from primeslurm.orchestrator.weight_updates.engine_client import EngineClient


class TimedClient(EngineClient):
    """Records the start and duration of each request to the engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requests: dict[str, tuple[float, float]] = {}

    async def _post(self, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> None:
        begun = time.monotonic()
        await super()._post(path, timeout_s, body)
        self.requests[path.partition("?")[0]] = (begun, time.monotonic() - begun)

    def split(self) -> dict[str, float]:
        """Return the seconds of the last update: `load` in the engine, and `pause` of generation."""
        load = self.requests["/update_weights"][1] + self.requests["/finish_weight_update"][1]
        resumed = sum(self.requests["/resume"])
        return {"load": load, "pause": resumed - self.requests["/pause"][0]}

    def parts(self, sent: float, connected: float) -> dict[str, float]:
        """Return consecutive parts of the last update [s], from its pause to its end.

        Args:
            sent: Seconds from the start of the session until the trainer had sent everything.
            connected: Seconds from the start of the session until all processes were connected.
        """
        # The session starts when the engine gets its place, which it pauses for.
        session, update = self.requests["/pause"][0], self.requests["/update_weights"]
        return {
            "pause request": self.requests["/pause"][1],
            "begin": self.requests["/start_weight_update"][1],
            "connect": session + connected - update[0],
            "transfer": sent - connected,
            "load the rest": sum(update) - (session + sent),
            "activate": self.requests["/finish_weight_update"][1],
            "resume": self.requests["/resume"][1],
        }
