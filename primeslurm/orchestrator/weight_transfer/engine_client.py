"""One engine as the orchestrator sees it: its status, and bringing it to a policy version."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import httpx
import msgspec

from primeslurm.orchestrator.weight_transfer.polling import HELD_UP, LEAST_S, AnswerTime
from primeslurm.wire.decoding import decode_json
from primeslurm.wire.names import STATUS_PATH
from primeslurm.wire.transport.http import internal_client, words
from primeslurm.wire.transport.retry import retry_times
from primeslurm.wire.weight_transfer.messages import EngineStatus, PolicyDirectory, SessionPlace, UpdateInfo


class PolicyVersion(msgspec.Struct, frozen=True):
    """A policy version, and the directory that holds it: the model's own for version 0, "" if the trainer sends it."""

    version: int
    path: str


class Sessions(Protocol):
    """Where engines come together with the trainer that sends a policy."""

    async def join(self, version: int) -> SessionPlace:
        """Wait for a place in a session."""
        ...

    def leave(self, session: str, reason: str) -> None:
        """Say that whoever had a place does not come, or stay."""
        ...


class Step(enum.Enum):
    """What brings an engine to a policy."""

    NOTHING = "nothing"
    RESUME = "resume"
    """It holds the policy, but whoever updated it did not live to resume it."""
    CONFIRM = "confirm"
    """It loaded this very policy at start and only has to be told its version."""
    UPDATE = "update"


class EngineDownError(Exception):
    """Nobody answers at the engine's address, or the process died while it was asked."""


class EngineUnresponsiveError(EngineDownError):
    """It took the connection, or may yet, and did not answer in time: it hangs, or has too much to do."""


class EventLoopDelayedError(Exception):
    """No answer was seen in time, but this process stood still itself: that says nothing of the engine."""


class EngineUpdateError(Exception):
    """The engine could not take a policy. It is paused, holds no usable weights, and has to be restarted."""


def next_step(status: EngineStatus, policy: PolicyVersion, model_path: str) -> Step:
    """Decide what has to be done to an engine that was started from `model_path`."""
    if status.version == policy.version:
        return Step.RESUME if status.paused else Step.NOTHING
    if status.updates == 0 and (policy.version == 0 or policy.path == model_path):
        return Step.CONFIRM
    return Step.UPDATE


class EngineClient:
    """Control of one engine, directly and never through a router (which would reach only one of several).

    Args:
        where: base URL of the engine's HTTP server as it is now.
        model_path: what the engine was started from.
        sessions: give an engine its part in a session with the trainer, for versions that no directory holds.
        tries: how often an update is tried, with generation paused all the while.
        status_timeout_s: shortest wait for a status; longer where the engine took longer before.
        trains_encoder: what the engine's encoder made of images before an update is not that of the new policy.
    """

    def __init__(
        self,
        where: Callable[[], str],
        model_path: str,
        sessions: Sessions | None = None,
        *,
        tries: int = 3,
        retry_s: float = 1.0,
        status_timeout_s: float = LEAST_S,
        trains_encoder: bool = False,
    ) -> None:
        self._where = where
        self._model_path = model_path
        self._sessions = sessions
        self._tries = tries
        self._retry_s = retry_s
        self._trains_encoder = trains_encoder
        self._answer_time = AnswerTime(status_timeout_s)
        self.seconds: dict[str, float] = {}
        """Of the last update: `wait` for the trainer's turn to send, `load` (and transfer), `pause` of generation."""
        # No connection is kept: uvicorn closes them after a failed request, and the next one would meet a dead one.
        self._http = internal_client(status_timeout_s, keep=0)
        # The exception: with hundreds of engines, connecting anew for every look would keep a core busy.
        self._looking = internal_client(status_timeout_s, keep=1)

    @property
    def url(self) -> str:
        """Return the base URL of the engine as it is now."""
        return self._where()

    async def status(self, own_delay_s: Callable[[], float] = lambda: 0.0) -> EngineStatus:
        """Ask for the engine's status.

        Args:
            own_delay_s: for how long this process has stood still so far.

        Raises:
            EngineDownError: nobody listens, or it answers nonsense.
            EngineUnresponsiveError: it did not answer in time.
            EventLoopDelayedError: whether it did cannot be told.
        """
        timeout_s, began, stood = self._answer_time.timeout_s, time.monotonic(), own_delay_s()
        try:
            response = await self._look(timeout_s)
            if response.status_code == httpx.codes.GATEWAY_TIMEOUT:  # its server lives, its core does not answer
                raise EngineUnresponsiveError(f"{self.url}: {words(response)}")
            response.raise_for_status()
            status = decode_json(response.content, EngineStatus)
        except httpx.TimeoutException as error:
            if (late := own_delay_s() - stood) > HELD_UP * timeout_s:
                raise EventLoopDelayedError(
                    f"this process stood still for {late:.1f} s of {timeout_s:.1f} s"
                ) from error
            self._answer_time.missed()
            raise EngineUnresponsiveError(f"{self.url}: no answer within {timeout_s:.1f} s") from error
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise EngineDownError(f"{self.url}: {_reason(error)}") from error
        self._answer_time.answered(max(0.0, time.monotonic() - began - (own_delay_s() - stood)))
        return status

    async def apply(
        self, policy: PolicyVersion, timeout_s: float, own_delay_s: Callable[[], float] = lambda: 0.0
    ) -> Step:
        """Bring the engine to `policy`; requests in flight are kept and go on with the new weights.

        Args:
            policy: what it is to serve.
            timeout_s: for all of it.
            own_delay_s: as of `status`.

        Returns:
            What had to be done: an engine that is there already is left alone.

        Raises:
            EngineUnresponsiveError: it did not answer a request in time. Perhaps it serves what it served before.
            EngineDownError: it is not there. No fault of the update: it will be met again.
            EngineUpdateError: it refused, or took longer than `timeout_s`. It was not resumed.
            NoSenderError: the trainer would have to send the policy, and does not send now.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._apply(policy, timeout_s, await self._certain_status(own_delay_s))
        except TimeoutError as error:
            text = f"{self.url}: version {policy.version} took longer than {timeout_s:.0f} s"
            raise EngineUpdateError(text) from error

    async def shutdown(self) -> None:
        """Have the engine's process end at once, so that its agent starts it anew. Raises EngineDownError."""
        try:
            await self._http.post(f"{self.url}/primeslurm/shutdown", timeout=self._answer_time.timeout_s)
        except httpx.HTTPError as error:
            raise EngineDownError(f"{self.url}: {_reason(error)}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
        await self._looking.aclose()

    async def _look(self, timeout_s: float) -> httpx.Response:
        url = self.url + STATUS_PATH
        try:
            return await self._looking.get(url, timeout=timeout_s)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # the kept connection was closed; only a new one tells whether the engine is gone
            return await self._http.get(url, timeout=timeout_s)

    async def _certain_status(self, own_delay_s: Callable[[], float]) -> EngineStatus:
        while True:
            with contextlib.suppress(EventLoopDelayedError):
                return await self.status(own_delay_s)

    async def _apply(self, policy: PolicyVersion, timeout_s: float, status: EngineStatus) -> Step:
        step = next_step(status, policy, self._model_path)
        if step is Step.CONFIRM:
            await self._post("/update_weight_version", timeout_s, {"new_version": str(policy.version)})
        if step is Step.UPDATE:
            if not status.initialized:
                await self._post("/init_weight_transfer_engine", timeout_s, {"init_info": {}})
            asked = time.monotonic()
            info = await self._update_info(policy)  # generation goes on while the engine waits for its turn
            told = time.monotonic()
            if not status.paused:  # pausing twice would have engines that share experts run a step
                with self._taking_part(info):
                    # clear_cache would preempt every running request and prefill it anew
                    await self._post("/pause?mode=keep&clear_cache=false", timeout_s)
            paused = time.monotonic()
            await self._update(policy, info, timeout_s)
            loaded = time.monotonic()
            await self._post("/resume", timeout_s)
            self.seconds = {"wait": told - asked, "load": loaded - paused, "pause": time.monotonic() - told}
        elif status.paused:
            await self._post("/resume", timeout_s)
        return step

    async def _update(self, policy: PolicyVersion, info: UpdateInfo, timeout_s: float) -> None:
        async for attempt in retry_times(EngineUpdateError, self._tries, self._retry_s):
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    info = await self._update_info(policy)
                with self._taking_part(info):
                    await self._post("/start_weight_update", timeout_s)
                    await self._post("/update_weights", timeout_s, {"update_info": msgspec.structs.asdict(info)})
                if self._trains_encoder:
                    # Its prefix cache is salted by the policy's version, this one knows images alone. A prompt that
                    # is half computed has what is left of its image encoded anew.
                    await self._post("/reset_encoder_cache", timeout_s)
                await self._post("/finish_weight_update", timeout_s, {"weight_version": str(policy.version)})

    async def _update_info(self, policy: PolicyVersion) -> UpdateInfo:
        if policy.path or self._sessions is None:
            return PolicyDirectory(policy.version, policy.path)
        return await self._sessions.join(policy.version)

    @contextlib.contextmanager
    def _taking_part(self, info: UpdateInfo) -> Iterator[None]:
        """Leave the session if the body fails or is given up: the others would wait for this engine."""
        try:
            yield
        except BaseException as error:
            if self._sessions is not None and isinstance(info, SessionPlace):
                self._sessions.leave(info.session, f"{self.url}: {_reason(error)}")
            raise

    async def _post(self, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> None:
        try:
            response = await self._http.post(f"{self.url}{path}", json=body, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise EngineUnresponsiveError(f"{self.url}{path}: {_reason(error)}") from error
        except httpx.TransportError as error:
            raise EngineDownError(f"{self.url}{path}: {_reason(error)}") from error
        if response.status_code != 200:
            raise EngineUpdateError(f"{self.url}{path}: {response.status_code} {words(response)}")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
