"""A small client of the Tinker API: what the trainer of a tenant's run needs of it.

Every request of a training run has a number, by which the service recognises a repetition. So requests are repeated
while the service cannot be reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from primeslurm.tinker.requests import NOT_FINITE, AdamParams, Datum
from primeslurm.tinker.wire import MESSAGES, encode_datum
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.transport.http import CONNECT_S, UNCOMPRESSED, error_text

# Tokens of one request of a pass. The service computes requests of this size together with those of others.
PASS_TOKENS = 8192
# Interval of the session's heartbeats [s]. The service ends a session after 15 minutes without one.
HEARTBEAT_S = 10.0
# A service that cannot be reached for this long raises UnreachableError [s].
UNREACHABLE_S = 600.0
RETRY_S = 1.0
# Longest wait for one answer [s]. The caller's own heartbeats pause meanwhile.
ANSWER_S = 10.0
_PAGE = 100  # checkpoints in one answer


class TinkerError(Exception):
    """The service refused a request, or a request failed there."""


class MissingError(TinkerError):
    """The service does not know what the request names: it has restarted, or a checkpoint was deleted."""


class NotFiniteError(TinkerError):
    """The gradient is not finite. The weights are unchanged."""


class UnreachableError(Exception):
    """The service gave no answer for UNREACHABLE_S."""


class TinkerClient:
    """A session with one training run. Not thread-safe.

    Args:
        http: Client with the base URL of the service and the API key.
        on_wait: Called repeatedly while an answer is awaited.
    """

    def __init__(
        self,
        http: httpx.Client,
        on_wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http, self._on_wait, self._clock, self._sleep = http, on_wait, clock, sleep
        self.session = ""
        self._run = ""
        self._number = 0
        self._heartbeat_at = clock()

    def open(self, name: str) -> str:
        """Begin a session. Return the name of the service's model."""
        capabilities = self._request("GET", "get_server_capabilities")
        self.session = self._request("POST", "create_session", {"display_name": name})["session_id"]
        model: str = capabilities["supported_models"][0]["model_name"]
        return model

    def create(self, model: str, rank: int, seed: int) -> None:
        """Create the training run, with a new adapter."""
        self._create("create_model", {"base_model": model, "lora_config": {"rank": rank, "seed": seed}})

    def load(self, path: str) -> None:
        """Create the training run from a checkpoint, with its optimizer. Raises MissingError if there is none."""
        self._create("load_weights", {"path": path, "optimizer": True})

    def forward(self, data: Sequence[Datum]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities of each datum's targets."""
        return self._pass(data, forward_only=True)

    def forward_backward(self, data: Sequence[Datum]) -> None:
        """Add the gradient of the sum of -weight * log-probability."""
        self._pass(data, forward_only=False)

    def optim_step(self, params: AdamParams) -> float:
        """Update the adapter. Return the norm of the gradient. Raises NotFiniteError."""
        result = self._result(self._send("optim_step", {"adam_params": params.model_dump()}))
        return float(result["metrics"]["grad_norm"])

    def save(self, name: str, metadata: Mapping[str, str]) -> str:
        """Save the adapter and its optimizer. Return the path of the checkpoint."""
        return self._save("save_weights", name, metadata)

    def export(self, name: str, metadata: Mapping[str, str]) -> str:
        """Write the adapter in PEFT format. Return the path of the checkpoint."""
        return self._save("save_weights_external", name, metadata)

    def checkpoints(self) -> Iterator[Mapping[str, Any]]:
        """Yield descriptions of all checkpoints of this user."""
        offset, total = 0, 1
        while offset < total:
            answer = self._request("GET", f"checkpoints?limit={_PAGE}&offset={offset}")
            yield from answer["checkpoints"]
            offset, total = offset + _PAGE, answer["cursor"]["total_count"]

    def delete(self, path: str) -> None:
        """Delete a checkpoint, if it is there."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        try:
            self._request("DELETE", f"training_runs/{run}/checkpoints/{kind}/{name}")
        except MissingError:
            return

    def finish(self, session: str) -> None:
        """End a session. Its named checkpoints stay."""
        self._request("POST", f"sessions/{session}/finish", {})

    def wait(self) -> None:
        """Send the session's heartbeat if it is due. Call this at least once a minute between requests."""
        self._on_wait()
        if self.session and self._clock() - self._heartbeat_at >= HEARTBEAT_S:
            self._heartbeat_at = self._clock()
            try:
                self._http.post("/api/v1/session_heartbeat", json={"session_id": self.session}, timeout=ANSWER_S)
            except httpx.HTTPError:
                return  # the next request waits for the service, or reports why it does not answer

    def _create(self, route: str, fields: Mapping[str, object]) -> None:
        answer = self._request("POST", route, {"session_id": self.session, "model_seq_id": 0, **fields})
        self._run, self._number = self._result(answer)["model_id"], 0

    def _save(self, route: str, name: str, metadata: Mapping[str, str]) -> str:
        fields = {"path": name, "overwrite": True, "user_metadata": dict(metadata)}
        path: str = self._result(self._send(route, fields))["path"]
        return path

    def _send(self, route: str, fields: Mapping[str, object]) -> Any:
        self._number += 1
        return self._request("POST", route, {"model_id": self._run, "seq_id": self._number, **fields})

    def _pass(self, data: Sequence[Datum], *, forward_only: bool) -> list[NDArray[np.float32]]:
        # All requests are sent before the first result is awaited, so the service is never idle between two of them.
        sent = []
        for chunk in _chunks(data):
            self._number += 1
            message = MESSAGES["ForwardBackwardRequest"](
                model_id=self._run, seq_id=self._number, loss_fn="cross_entropy", forward_only=forward_only
            )
            for datum in chunk:
                encode_datum(message.data.add(), datum)
            sent.append(self._request("POST", "forward_backward", message.SerializeToString()))
        outputs = [self._result(answer) for answer in sent]
        records = [record for output in outputs for record in output.loss_fn_outputs]
        return [np.frombuffer(record.fields[0].value.data, np.float32) for record in records]

    def _result(self, sent: Mapping[str, Any]) -> Any:
        """Return the result of a request: a JSON object, or a message of protobuf."""
        result = self._request("POST", "retrieve_future", {"request_id": sent["request_id"]})
        if isinstance(result, bytes):
            return MESSAGES["ForwardBackwardOutput"].FromString(result)
        if "error" in result:
            raise (NotFiniteError if NOT_FINITE in result["error"] else TinkerError)(result["error"])
        return result

    def _request(self, method: str, route: str, body: Mapping[str, object] | bytes | None = None) -> Any:
        """Send a request until it is answered. Raises UnreachableError, MissingError or TinkerError."""
        options: dict[str, Any] = {} if body is None else {"json": body}
        if isinstance(body, bytes):
            options = {"content": body, "headers": {"Content-Type": "application/x-protobuf"}}
        deadline = self._clock() + UNREACHABLE_S
        while True:
            self.wait()
            try:
                answer = self._http.request(method, f"/api/v1/{route}", **options)
                if answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                    if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
                        return _content(route, answer)
                    deadline = self._clock() + UNREACHABLE_S  # it computes, or others' requests
                    continue
                problem = f"{answer.status_code} {error_text(answer.content)}"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} {error}"
                if isinstance(error, httpx.ReadTimeout) and route == "retrieve_future":
                    continue
            if self._clock() > deadline:
                raise UnreachableError(f"the Tinker service at {self._http.base_url}: {route}: {problem}")
            self._sleep(RETRY_S)


def connect(url: str, key: str) -> httpx.Client:
    """Return an HTTP client for `TinkerClient`."""
    return httpx.Client(
        base_url=url.rstrip("/"),
        headers=UNCOMPRESSED | {"X-API-Key": key},
        timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S, write=60.0),
        trust_env=False,
    )


def _content(route: str, answer: httpx.Response) -> Any:
    if not answer.is_success:
        kind = MissingError if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.GONE) else TinkerError
        raise kind(f"the Tinker service refused {route}: {answer.status_code} {error_text(answer.content)}")
    if "protobuf" in answer.headers.get("content-type", ""):
        return answer.content
    try:
        return decode_json(answer.content, dict[str, Any]) if answer.content else {}
    except DamagedError as error:
        raise TinkerError(f"the Tinker service gave a damaged answer to {route}: {error}") from error


def _chunks(data: Sequence[Datum]) -> Iterator[list[Datum]]:
    """Split data into requests of at most PASS_TOKENS, or of one longer sequence."""
    chunk, tokens = list[Datum](), 0
    for datum in data:
        if chunk and tokens + len(datum.tokens) > PASS_TOKENS:
            yield chunk
            chunk, tokens = [], 0
        chunk.append(datum)
        tokens += len(datum.tokens)
    if chunk:
        yield chunk
