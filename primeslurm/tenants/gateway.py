"""The gateway of a tenant's run, `python -m primeslurm.tenants.gateway`: its only router and its only engine.

To the orchestrator it is an engine behind `VersionGate`. A weight update only changes the name of the adapter that
requests ask for, so nothing pauses, and a request keeps the adapter that it began with. The deployment's engines load
adapters by name, which is the path of the exported adapter below `tenant.adapters`. Version 0 is the model itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn

from primeslurm.base import files, logs
from primeslurm.inference.auth import Message, Receive, Scope, Send, answer
from primeslurm.inference.version_gate import VersionGate
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.tenant import Tenant
from primeslurm.tenants.quota import Quota, TokenBudget
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.names import DEPLOYMENT_TOKEN, SERVED_MODEL
from primeslurm.wire.transport import secret
from primeslurm.wire.transport.http import internal_client
from primeslurm.wire.weight_transfer.messages import PolicyDirectory

GENERATE = "/inference/v1/generate"
# Request headers that concern one connection, or that this run's processes use among themselves
_OWN_HEADERS = {b"host", b"content-length", b"connection", b"authorization", b"accept-encoding", b"transfer-encoding"}
# Control routes of an engine for which there is nothing to do
_IGNORED = {"/pause", "/resume", "/start_weight_update", "/init_weight_transfer_engine", "/is_paused", "/health"}


class _Update(msgspec.Struct):
    update_info: PolicyDirectory


class _Version(msgspec.Struct):
    weight_version: str = ""
    new_version: str = ""

    @property
    def number(self) -> int:
        return int(self.weight_version or self.new_version)


@dataclass(frozen=True)
class Policy:
    """A version, and its model name in requests to the deployment's engines."""

    version: int
    model: str

    @classmethod
    def of(cls, directory: PolicyDirectory, adapters: Path) -> Policy:
        """Return the policy in a directory. Raises ValueError if engines cannot load adapters from there."""
        if directory.version == 0:
            return cls(0, SERVED_MODEL)
        return cls(directory.version, str(Path(os.path.normpath(directory.path)).relative_to(adapters)))


class Gateway:
    """The ASGI application behind the gate.

    Args:
        http: Client with the deployment's token.
    """

    def __init__(self, tenant: Tenant, http: httpx.AsyncClient, budget: TokenBudget | None = None) -> None:
        self._url = tenant.router.rstrip("/") + GENERATE
        self._adapters = Path(os.path.normpath(tenant.adapters))
        self._http = http
        self._quota = Quota(tenant.max_inflight, budget or TokenBudget(tenant.tokens_per_second))
        self._policy: Policy | None = None
        self._updated: Policy | None = None  # policy of an update that has not finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])  # uvicorn does without lifespan then
        path: str = scope["path"]
        if path == GENERATE and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        elif path in ("/update_weights", "/finish_weight_update", "/update_weight_version"):
            try:
                self._control(path, await _body(receive))
            except (DamagedError, ValueError) as error:
                await answer(send, HTTPStatus.BAD_REQUEST, {"error": str(error)})
            else:
                await answer(send, HTTPStatus.OK, {})
        elif path in _IGNORED:
            await answer(send, HTTPStatus.OK, {})
        else:
            await answer(send, HTTPStatus.NOT_FOUND, {"error": f"the gateway of a tenant's run has no route {path}"})

    def _control(self, path: str, body: bytes) -> None:
        """Follow a weight update. Raises DamagedError or ValueError if it cannot be followed."""
        if path == "/update_weights":
            self._updated = Policy.of(decode_json(body, _Update).update_info, self._adapters)
            return
        version = decode_json(body, _Version).number
        policy = Policy(0, SERVED_MODEL) if version == 0 else self._updated
        if policy is None or policy.version != version:
            raise ValueError(f"version {version} was not announced by /update_weights")
        self._policy = policy

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, unless its client disconnects. Then the deployment's engine drops it, too."""
        body = await _body(receive)
        forwarding = asyncio.ensure_future(self._forward(body, scope["headers"]))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({forwarding, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                status, content = forwarding.result()
                await _send(send, status, content)
        finally:
            forwarding.cancel()
            leaving.cancel()

    async def _forward(self, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
        """Return status and body of the answer of the deployment."""
        try:
            request = decode_json(body, dict[str, Any])
        except DamagedError as error:
            return HTTPStatus.BAD_REQUEST, msgspec.json.encode({"error": str(error)})
        async with self._quota.request() as budget:
            policy = self._policy
            assert policy is not None  # the gate is open
            content = msgspec.json.encode(request | {"model": policy.model})
            kept = [(name, value) for name, value in headers if name.lower() not in _OWN_HEADERS]
            try:
                got = await self._http.post(self._url, content=content, headers=kept)
            except httpx.HTTPError as error:
                text = f"the deployment's router {self._url} gave no answer: {type(error).__name__} {error}"
                return HTTPStatus.BAD_GATEWAY, msgspec.json.encode({"error": text})
            # A 500 with this engine's header would count as a fault of the gateway, and restart it.
            status = HTTPStatus.BAD_GATEWAY if got.status_code == HTTPStatus.INTERNAL_SERVER_ERROR else got.status_code
            if not got.is_success:
                return status, got.content
            try:
                answered = decode_json(got.content, dict[str, Any])
                budget.spend(_label(answered, policy.version))
            except (DamagedError, LookupError, TypeError) as error:
                text = f"the deployment's router gave a damaged answer: {type(error).__name__} {error}"
                return HTTPStatus.BAD_GATEWAY, msgspec.json.encode({"error": text})
            return status, msgspec.json.encode(answered)


def _label(answered: dict[str, Any], version: int) -> int:
    """Add the policy version to each sample of an answer. Return the number of sampled tokens."""
    tokens = 0
    for choice in answered["choices"]:
        sampled = len(choice["token_ids"])
        choice["weight_versions"] = [{"version": str(version), "start": 0, "end": sampled}]
        tokens += sampled
    return tokens


async def _body(receive: Receive) -> bytes:
    chunks, more = [], True
    while more:
        message = await receive()
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, content: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    start: Message = {"type": "http.response.start", "status": int(status), "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": content})


async def _serve(tenant: Tenant, host: str, port: int) -> None:
    token = os.environ.pop(DEPLOYMENT_TOKEN, "")
    # Requests have the time limit of their clients, who disconnect then.
    async with internal_client(None, headers={"Authorization": f"Bearer {token}"}) as http:
        gate = VersionGate(Gateway(tenant, http))
        await uvicorn.Server(
            uvicorn.Config(
                gate,
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,  # clients ask again
            )
        ).serve()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.tenants.gateway", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe (JSON)")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args(argv)
    secret.take()
    logs.configure()
    tenant = Recipe.model_validate_json(files.read_bytes(arguments.recipe)).tenant
    if tenant is None:
        parser.error("the recipe has no section `tenant`")
    asyncio.run(_serve(tenant, arguments.host, arguments.port))


if __name__ == "__main__":
    main()
