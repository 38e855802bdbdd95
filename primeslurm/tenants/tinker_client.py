"""A small client of the Tinker API: what the trainer of a tenant's run needs of it.

Every request of a training run has a number, by which the service recognises a repetition. So requests are repeated
while the service cannot be reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import httpx
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from primeslurm.tinker.requests import NOT_FINITE, WEIGHT, AdamParams, Datum
from primeslurm.tinker.wire import MESSAGES, encode_datum
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.transport.http import CONNECT_S, UNCOMPRESSED, error_text

# Sequences that begin within this many tokens are one request, which the service computes together with others.
PASS_TOKENS = 4096
# Interval of the session's heartbeats [s]. The service ends a session after 15 minutes without one.
HEARTBEAT_S = 10.0
# A service that cannot be reached for this long raises ConnectionError [s].
UNREACHABLE_S = 600.0
RETRY_S = 1.0
# The service answers a poll after this time [s], so that heartbeats are sent while a result is computed.
POLL_S = 5.0
# Longest wait for one answer [s]. It is longer than any poll, because an abandoned poll stays in the service.
ANSWER_S = 45.0
_CHECKPOINTS = 1_000_000  # more than one user has


class TinkerError(Exception):
    """The service refused a request, or a request failed there."""


class MissingError(TinkerError):
    """The service does not know what the request names: it has restarted, or a checkpoint was deleted."""


class TinkerClient:
    """A session with one training run. Not thread-safe.

    Args:
        http: Client with the base URL of the service and the API key.
        on_wait: Called repeatedly while an answer is awaited.
    """

    def __init__(self, http: httpx.Client, on_wait: Callable[[], None] = lambda: None) -> None:
        self._http, self._on_wait = http, on_wait
        self.session, self._run, self._number = "", "", 0
        self._heartbeat_at = time.monotonic()

    def open(self, name: str, weight: float = 1.0) -> str:
        """Begin a session. Return the name of the service's model. `weight`: share of the service."""
        capabilities = self._request("GET", "get_server_capabilities")
        session = {"display_name": name, "user_metadata": {WEIGHT: weight}}
        self.session = self._request("POST", "create_session", session)["session_id"]
        model: str = capabilities["supported_models"][0]["model_name"]
        return model

    def create(self, model: str, rank: int, seed: int) -> None:
        """Create the training run, with a new adapter."""
        self._create("create_model", {"base_model": model, "lora_config": {"rank": rank, "seed": seed}})

    def load(self, path: str) -> None:
        """Create the training run from a checkpoint, with its optimizer. Raises MissingError if there is none."""
        self._create("load_weights", {"path": path, "optimizer": True})

    def forward_backward(self, data: Sequence[Datum], *, forward_only: bool = False) -> list[NDArray[np.float32]]:
        """Add the gradient of the sum of -weight * logprob. Return the log-probabilities of each datum's targets."""
        # All requests are sent before the first result is awaited, so the service is never idle between two of them.
        sent, starts = [], np.cumsum([0, *(len(datum.tokens) for datum in data)])
        for _, chunk in groupby(zip(starts // PASS_TOKENS, data, strict=False), itemgetter(0)):
            self._number += 1
            message = MESSAGES["ForwardBackwardRequest"](
                model_id=self._run, seq_id=self._number, loss_fn="cross_entropy", forward_only=forward_only
            )
            for _, datum in chunk:
                encode_datum(message.data.add(), datum)
            sent.append(self._request("POST", "forward_backward", message.SerializeToString()))
        outputs = [self._result(answer) for answer in sent]
        records = [record for output in outputs for record in output.loss_fn_outputs]
        return [np.frombuffer(record.fields[0].value.data, np.float32) for record in records]

    def optim_step(self, params: AdamParams) -> float:
        """Update the adapter. Return the norm of the gradient. Raises FloatingPointError if it is not finite."""
        result = self._submit("optim_step", {"adam_params": params.model_dump()})
        return float(result["metrics"]["grad_norm"])

    def save(self, name: str, metadata: Mapping[str, str], *, external: bool) -> str:
        """Save the adapter in PEFT format (`external`), or with its optimizer. Return the path of the checkpoint."""
        fields = {"path": name, "overwrite": True, "user_metadata": dict(metadata)}
        path: str = self._submit("save_weights_external" if external else "save_weights", fields)["path"]
        return path

    def checkpoints(self) -> list[Mapping[str, Any]]:
        """Return descriptions of all checkpoints of this user."""
        described: list[Mapping[str, Any]] = self._request("GET", f"checkpoints?limit={_CHECKPOINTS}")["checkpoints"]
        return described

    def delete(self, path: str) -> None:
        """Delete a checkpoint. Raises MissingError if there is none."""
        run, checkpoint = path.removeprefix("tinker://").split("/", 1)
        self._request("DELETE", f"training_runs/{run}/checkpoints/{checkpoint}")

    def finish(self, session: str) -> None:
        """End a session. Its named checkpoints stay."""
        self._request("POST", f"sessions/{session}/finish", {})

    def wait(self) -> None:
        """Send the session's heartbeat if it is due. Call this at least once a minute between requests."""
        self._on_wait()
        if self.session and time.monotonic() - self._heartbeat_at >= HEARTBEAT_S:
            self._heartbeat_at = time.monotonic()
            try:
                self._http.post("/api/v1/session_heartbeat", json={"session_id": self.session})
            except httpx.HTTPError:
                return  # the next request waits for the service, or reports why it does not answer

    def _create(self, route: str, fields: Mapping[str, object]) -> None:
        answer = self._request("POST", route, {"session_id": self.session, "model_seq_id": 0, **fields})
        self._run, self._number = self._result(answer)["model_id"], 0

    def _submit(self, route: str, fields: Mapping[str, object]) -> Any:
        """Send the next request of the training run, and return its result."""
        self._number += 1
        return self._result(self._request("POST", route, {"model_id": self._run, "seq_id": self._number, **fields}))

    def _result(self, sent: Mapping[str, Any]) -> Any:
        """Return the result of a request: a JSON object, or that of a pass."""
        result = self._request("POST", "retrieve_future", {"request_id": sent["request_id"], "wait_s": POLL_S})
        if isinstance(result, dict) and "error" in result:
            raise (FloatingPointError if NOT_FINITE in result["error"] else TinkerError)(result["error"])
        return result

    def _request(self, method: str, route: str, body: Mapping[str, object] | bytes | None = None) -> Any:
        """Send a request until it is answered. Raises ConnectionError, MissingError or TinkerError."""
        options: dict[str, Any] = {} if body is None else {"json": body}
        if isinstance(body, bytes):
            options = {"content": body, "headers": {"Content-Type": "application/x-protobuf"}}
        deadline, problem = time.monotonic() + UNREACHABLE_S, ""
        while time.monotonic() < deadline:
            self.wait()
            try:
                answer = self._http.request(method, f"/api/v1/{route}", **options)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} {error}"
            else:
                problem = f"{answer.status_code} {error_text(answer.content)}"
                if answer.status_code == httpx.codes.REQUEST_TIMEOUT:  # it computes this request, or those of others
                    deadline = time.monotonic() + UNREACHABLE_S
                    continue
                if answer.is_success:
                    try:
                        return _decoded(answer)
                    except DamagedError as error:  # the connection may be at fault
                        problem = str(error)
                elif not answer.is_server_error:
                    is_missing = answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.GONE)
                    text = f"the Tinker service refused {route}: {problem}"
                    raise MissingError(text) if is_missing else TinkerError(text)
            time.sleep(RETRY_S)
        raise ConnectionError(f"the Tinker service at {self._http.base_url}: {route}: {problem}")


def _decoded(answer: httpx.Response) -> Any:
    """Return a JSON object, or the result of a pass. Raises DamagedError."""
    if "json" in answer.headers.get("content-type", ""):
        return decode_json(answer.content, dict[str, Any])
    try:
        return MESSAGES["ForwardBackwardOutput"].FromString(answer.content)
    except DecodeError as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error


def connect(url: str, key: str) -> httpx.Client:
    """Return an HTTP client for `TinkerClient`."""
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, write=60.0)
    headers = UNCOMPRESSED | {"X-API-Key": key}
    return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout, trust_env=False)
