"""The gateway of a tenant's run, `python -m primeslurm.tenants.gateway`: its only router and its only engine.

To the orchestrator it is an engine behind `VersionGate`. A weight update only changes the name of the adapter that
requests ask for, so nothing pauses, and a request keeps the adapter that it began with. The deployment's engines load
adapters by name, which is the path of the exported adapter below `tenant.adapters`. Version 0 is the model itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn

from primeslurm.base import files, logs
from primeslurm.inference.auth import Receive, Scope, Send, answer
from primeslurm.inference.version_gate import VersionGate, read_body
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.tenant import Tenant
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.names import GENERATE, SERVED_MODEL
from primeslurm.wire.transport import secret
from primeslurm.wire.transport.http import internal_client

# Headers of a request that concern its connection, or its authentication
_OWN_HEADERS = {b"host", b"content-length", b"connection", b"authorization", b"accept-encoding", b"transfer-encoding"}
# Control routes of an engine for which there is nothing to do
_IGNORED = {"/pause", "/resume", "/start_weight_update", "/init_weight_transfer_engine", "/is_paused", "/health"}
_Answer = tuple[int, dict[str, Any] | msgspec.Raw]


class TokenBudget:
    """Limits the average rate of sampled tokens. Pure; `clock` is in seconds.

    The length of an answer is known only at its end. So a request may start once all earlier answers are paid for.
    """

    def __init__(self, tokens_per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = tokens_per_second, clock
        self._paid_at = clock()

    def spend(self, tokens: int) -> None:
        if self._rate is not None:
            self._paid_at = max(self._paid_at, self._clock()) + tokens / self._rate

    @property
    def wait_s(self) -> float:
        """Return the time until the next request may start [s]."""
        return max(0.0, self._paid_at - self._clock())


class Gateway:
    """The ASGI application behind the gate. `http` is a client with the deployment's token."""

    def __init__(self, tenant: Tenant, http: httpx.AsyncClient) -> None:
        self._url, self._http = tenant.router.rstrip("/") + GENERATE, http
        self._adapters = os.path.normpath(tenant.adapters)
        self._slots = asyncio.Semaphore(tenant.max_inflight) if tenant.max_inflight else contextlib.nullcontext()
        self._budget = TokenBudget(tenant.tokens_per_second)
        self._models = {"0": SERVED_MODEL}  # model name in requests of version 0, and of the last update
        self._version = "0"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        try:
            if path == GENERATE:
                await self._generate(scope, receive, send)
                return
            if path == "/update_weights":
                self._announce(decode_json(await read_body(receive) or b"", dict[str, Any])["update_info"])
            elif path in ("/finish_weight_update", "/update_weight_version"):
                body = decode_json(await read_body(receive) or b"", dict[str, Any])
                version = body.get("weight_version") or body["new_version"]
                self._models = {name: self._models[name] for name in {"0", version}}
                self._version = version
            elif path not in _IGNORED:
                await answer(send, HTTPStatus.NOT_FOUND, {"error": f"the gateway of a tenant's run has no {path}"})
                return
            await answer(send, HTTPStatus.OK, {})
        except (DamagedError, LookupError, ValueError) as error:
            await answer(send, HTTPStatus.BAD_REQUEST, {"error": f"{path}: {type(error).__name__} {error}"})

    def _announce(self, info: dict[str, Any]) -> None:
        """Remember the adapter of a version. Raises ValueError if engines cannot load it by a name."""
        if info["version"]:
            name = Path(os.path.normpath(info["path"])).relative_to(self._adapters)
            self._models[str(info["version"])] = str(name)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, unless its client disconnects. Then the deployment's engine drops it, too."""
        request = decode_json(await read_body(receive) or b"", dict[str, Any])
        forwarding = asyncio.ensure_future(self._forward(request, scope["headers"]))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({forwarding, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                await answer(send, *forwarding.result())
        finally:
            forwarding.cancel()
            leaving.cancel()

    async def _forward(self, request: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> _Answer:
        """Return status and body of the deployment's answer."""
        async with self._slots:
            while wait_s := self._budget.wait_s:
                await asyncio.sleep(wait_s)
            version = self._version
            content = msgspec.json.encode(request | {"model": self._models[version]})
            kept = [(name, value) for name, value in headers if name.lower() not in _OWN_HEADERS]
            try:
                got = await self._http.post(self._url, content=content, headers=kept)
                if got.is_success:
                    answered = decode_json(got.content, dict[str, Any])
                    self._budget.spend(_label(answered, version))
                    return HTTPStatus.OK, answered
            except (httpx.HTTPError, DamagedError, LookupError, TypeError) as error:
                text = f"the deployment's router {self._url} gave no usable answer: {type(error).__name__} {error}"
                return HTTPStatus.BAD_GATEWAY, {"error": text}
        # A 500 with this engine's header would count as a fault of the gateway, and restart it.
        is_fault = got.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
        return HTTPStatus.BAD_GATEWAY if is_fault else got.status_code, msgspec.Raw(got.content or b"{}")


def _label(answered: dict[str, Any], version: str) -> int:
    """Add the policy version to each sample of an answer. Return the number of sampled tokens."""
    for choice in answered["choices"]:
        choice["weight_versions"] = [{"version": version, "start": 0, "end": len(choice["token_ids"])}]
    return sum(len(choice["token_ids"]) for choice in answered["choices"])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _serve(tenant: Tenant, host: str, port: int) -> None:
    token = {"Authorization": f"Bearer {secret.read(tenant.deployment)}"}
    async with internal_client(None, headers=token) as http:  # clients limit the time of their requests
        gate = VersionGate(Gateway(tenant, http))
        config = uvicorn.Config(gate, host=host, port=port, log_level="warning", access_log=False, lifespan="off")
        config.timeout_graceful_shutdown = 1  # clients ask again
        await uvicorn.Server(config).serve()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.tenants.gateway", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe (JSON)")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args(argv)
    secret.take()
    logs.configure()
    tenant = Recipe.model_validate_json(files.read_bytes(arguments.recipe)).tenant
    assert tenant is not None  # as the plan says
    asyncio.run(_serve(tenant, arguments.host, arguments.port))


if __name__ == "__main__":
    main()
