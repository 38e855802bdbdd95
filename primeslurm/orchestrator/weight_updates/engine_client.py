"""One engine as the orchestrator sees it: its status, and weight updates."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec

from primeslurm.orchestrator.weight_updates.polling import MAX_DELAY_FRACTION, MIN_TIMEOUT_S, AnswerTimeout
from primeslurm.orchestrator.weight_updates.sessions import TransferSessions
from primeslurm.wire.decoding import decode_json
from primeslurm.wire.names import STATUS_PATH
from primeslurm.wire.transport.http import error_text, internal_client
from primeslurm.wire.transport.retry import retry_times
from primeslurm.wire.weight_transfer.messages import EngineStatus, PolicyDirectory, SessionPlace, UpdateInfo

# Tries of an update, and the pause after a failed one. Generation is paused all the while.
TRIES, RETRY_S = 3, 1.0


class PolicyVersion(msgspec.Struct, frozen=True):
    """A policy version and its directory: the model's own for version 0, "" if the trainer sends the weights."""

    version: int
    path: str


class Step(enum.Enum):
    """How an engine gets to a policy."""

    NOTHING = "nothing"
    # It holds the policy, but the orchestrator that updated it was killed before it resumed the engine.
    RESUME = "resume"
    CONFIRM = "confirm"  # it loaded this policy at start, and must only be told the version
    UPDATE = "update"


class EngineDownError(Exception):
    """No server answers at the engine's address, or the process died during a request."""


class EngineUnresponsiveError(EngineDownError):
    """The engine did not answer in time: it hangs, or has too much to do."""


class EventLoopDelayedError(Exception):
    """No answer was seen in time, but this process itself was delayed, which says nothing about the engine."""


class EngineUpdateError(Exception):
    """The engine could not load a policy. It is paused without usable weights, and has to be restarted."""


def next_step(status: EngineStatus, policy: PolicyVersion, model_path: str, adapter: bool = False) -> Step:
    """Return what an engine that was started from `model_path` needs to serve `policy`.

    `adapter`: policies are adapters. Then an engine has even version 0 only after an update, because requests name the
    adapter from the start.
    """
    if status.version == policy.version:
        return Step.RESUME if status.paused else Step.NOTHING
    if not adapter and status.updates == 0 and (policy.version == 0 or policy.path == model_path):
        return Step.CONFIRM
    return Step.UPDATE


class EngineClient:
    """Controls one engine directly. A router would pass a request on to any of its engines.

    Args:
        where: Returns the current base URL of the engine's HTTP server.
        sessions: Sessions with the trainer, for versions without a directory.
        status_timeout_s: Minimum timeout of a status. It grows with the engine's answer times.
        trains_encoder: The trainer updates the image encoder, so cached image features become invalid.
        adapter: Policies are adapters, which engines read while they generate.
    """

    def __init__(
        self,
        where: Callable[[], str],
        model_path: str,
        sessions: TransferSessions | None = None,
        *,
        status_timeout_s: float = MIN_TIMEOUT_S,
        trains_encoder: bool = False,
        adapter: bool = False,
    ) -> None:
        self._where = where
        self._model_path = model_path
        self._sessions = sessions
        self._trains_encoder = trains_encoder
        self._adapter = adapter
        self._status_timeout = AnswerTimeout(status_timeout_s)
        # Parts of the last update: `wait` for the trainer, `load` (with transfer), `pause` of generation.
        self.seconds: dict[str, float] = {}
        self._pause_began = 0.0
        # Connections are not kept, because uvicorn closes them after a failed request, and the next request would fail.
        self._http = internal_client(status_timeout_s, keep=0)
        # Polls are the exception: with hundreds of engines, reconnecting for every poll would keep a core busy.
        self._polling = internal_client(status_timeout_s, keep=1)

    @property
    def url(self) -> str:
        return self._where()

    async def status(self, own_delay_s: Callable[[], float] = lambda: 0.0) -> EngineStatus:
        """Poll the engine's status.

        Args:
            own_delay_s: Returns the total delay of this process's event loop so far.

        Raises:
            EngineDownError: No server listens, or its answer is invalid.
            EngineUnresponsiveError: The engine did not answer in time.
            EventLoopDelayedError: It is unknown whether the engine answered in time.
        """
        timeout_s, began, delay_before_s = self._status_timeout.seconds, time.monotonic(), own_delay_s()
        try:
            response = await self._poll(timeout_s)
            if response.status_code == httpx.codes.GATEWAY_TIMEOUT:  # the API server answers, but its core does not
                raise EngineUnresponsiveError(f"{self.url}: {error_text(response.content)}")
            response.raise_for_status()
            status = decode_json(response.content, EngineStatus)
        except httpx.TimeoutException as error:
            if (delay_s := own_delay_s() - delay_before_s) > MAX_DELAY_FRACTION * timeout_s:
                text = f"this process was delayed for {delay_s:.1f} s of {timeout_s:.1f} s"
                raise EventLoopDelayedError(text) from error
            self._status_timeout.missed()
            raise EngineUnresponsiveError(f"{self.url}: no answer within {timeout_s:.1f} s") from error
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            # A server that closes connections may still serve. It is down if nothing accepts them.
            kind = EngineDownError if isinstance(error, httpx.ConnectError) else EngineUnresponsiveError
            raise kind(f"{self.url}: {_reason(error)}") from error
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise EngineDownError(f"{self.url}: {_reason(error)}") from error
        self._status_timeout.answered(max(0.0, time.monotonic() - began - (own_delay_s() - delay_before_s)))
        return status

    async def apply(
        self, policy: PolicyVersion, timeout_s: float, own_delay_s: Callable[[], float] = lambda: 0.0
    ) -> Step:
        """Bring the engine to `policy`. Running requests continue with the new weights.

        Returns:
            The step that was needed. An engine that serves the policy already is left alone.

        Raises:
            EngineUnresponsiveError: The engine did not answer a request in time. It may still serve the old policy.
            EngineDownError: The engine is down. The update is repeated later.
            EngineUpdateError: The engine refused, or took longer than `timeout_s`. It was not resumed.
            NoSenderError: The trainer would have to send the policy, and does not send now.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._apply(policy, timeout_s, await self._certain_status(own_delay_s))
        except TimeoutError as error:
            text = f"{self.url}: version {policy.version} took longer than {timeout_s:.0f} s"
            raise EngineUpdateError(text) from error

    async def shutdown(self) -> None:
        """End the engine's process at once, so that its agent restarts it. Raise EngineDownError."""
        try:
            await self._http.post(f"{self.url}/primeslurm/shutdown", timeout=self._status_timeout.seconds)
        except httpx.HTTPError as error:
            raise EngineDownError(f"{self.url}: {_reason(error)}") from error

    async def close(self) -> None:
        await self._http.aclose()
        await self._polling.aclose()

    async def _poll(self, timeout_s: float) -> httpx.Response:
        url = self.url + STATUS_PATH
        try:
            return await self._polling.get(url, timeout=timeout_s)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # The kept connection was closed. Only a new one shows whether the engine is down.
            return await self._http.get(url, timeout=timeout_s)

    async def _certain_status(self, own_delay_s: Callable[[], float]) -> EngineStatus:
        while True:
            with contextlib.suppress(EventLoopDelayedError):
                return await self.status(own_delay_s)

    async def _apply(self, policy: PolicyVersion, timeout_s: float, status: EngineStatus) -> Step:
        step = next_step(status, policy, self._model_path, self._adapter)
        if step is Step.CONFIRM:
            await self._post("/update_weight_version", timeout_s, {"new_version": str(policy.version)})
        if step is Step.UPDATE:
            if not status.initialized:
                await self._post("/init_weight_transfer_engine", timeout_s, {"init_info": {}})
            began = time.monotonic()
            info = await self._update_info(policy)  # generation continues while the engine waits for the trainer
            waited = time.monotonic()
            if not self._adapter:
                await self._pause(status, info, timeout_s)
            loading = time.monotonic()
            await self._update(policy, info, timeout_s, status)
            loaded = time.monotonic()
            await self._post("/resume", timeout_s)
            pause_s = time.monotonic() - self._pause_began
            self.seconds = {"wait": waited - began, "load": loaded - loading, "pause": pause_s}
        elif status.paused:
            await self._post("/resume", timeout_s)
        return step

    async def _pause(self, status: EngineStatus, info: UpdateInfo, timeout_s: float) -> None:
        self._pause_began = time.monotonic()
        if not status.paused:  # pausing twice would make engines that share experts run a step
            with self._taking_part(info):
                # clear_cache would preempt every running request and prefill it again
                await self._post("/pause?mode=keep&clear_cache=false", timeout_s)

    async def _update(self, policy: PolicyVersion, info: UpdateInfo, timeout_s: float, status: EngineStatus) -> None:
        async for attempt in retry_times(EngineUpdateError, TRIES, RETRY_S):
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    info = await self._update_info(policy)
                with self._taking_part(info):
                    await self._post("/start_weight_update", timeout_s)
                    await self._post("/update_weights", timeout_s, {"update_info": msgspec.structs.asdict(info)})
                if self._adapter:
                    # Without this short pause, steps on their way would be reported under the new version.
                    await self._pause(status, info, timeout_s)
                if self._trains_encoder:
                    # The prefix cache is salted by policy version, but the encoder cache knows images alone. A prompt
                    # that is half computed has the rest of its image encoded again.
                    await self._post("/reset_encoder_cache", timeout_s)
                await self._post("/finish_weight_update", timeout_s, {"weight_version": str(policy.version)})

    async def _update_info(self, policy: PolicyVersion) -> UpdateInfo:
        if policy.path or self._sessions is None:
            return PolicyDirectory(policy.version, policy.path, self._adapter)
        return await self._sessions.join(policy.version, self.url)

    @contextlib.contextmanager
    def _taking_part(self, info: UpdateInfo) -> Iterator[None]:
        """Leave the session if the body fails or is cancelled, because the other members would wait for this engine."""
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
            raise EngineUpdateError(f"{self.url}{path}: {response.status_code} {error_text(response.content)}")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
