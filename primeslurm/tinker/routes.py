"""The HTTP routes of the Tinker API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated

from fastapi import APIRouter, Body, Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from primeslurm.tinker.checkpoints import add_checkpoint_routes
from primeslurm.tinker.requests import RequestError
from primeslurm.tinker.service import USER, Answer, BodyField, Service

log = logging.getLogger(__name__)
# A client waits this long for a result before it asks again [s]. Clients give up after 45 s.
POLL_S = 30.0
# Size of a token with its target and weight, by which clients split their data into passes [bytes]. Other losses have
# larger ones.
TARGET_BYTES = 16
# Seconds between two searches for unresponsive sessions.
EXPIRY_S = 60.0


def application(service: Service, users: Mapping[str, str], poll_s: float = POLL_S) -> FastAPI:
    """Return the application. `users` are the users of the API keys. The health check and downloads need no key."""

    async def authenticate(request: Request, x_api_key: str = Header("")) -> None:
        for key, user in users.items():
            if secrets.compare_digest(x_api_key.encode(), key.encode()):
                request.state.user = user
                USER.set(user)
                return
        why = "is no key of this service; set TINKER_API_KEY to the key that `primeslurm tinker serve` printed"
        raise RequestError("X-API-Key", "", why, 401)

    async def expire_sessions() -> None:
        while True:
            try:
                await service.expire_sessions()
            except Exception:  # the disk may be full for a while, and no error may end this loop
                log.exception("unresponsive sessions are not ended yet")
            await asyncio.sleep(EXPIRY_S)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(expire_sessions())
        yield
        task.cancel()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    _answer_errors(app, service)

    public = APIRouter(prefix="/api/v1")

    @public.get("/healthz")
    async def health() -> Answer:
        return {"status": "ok"}

    api = APIRouter(prefix="/api/v1", dependencies=[Depends(authenticate)])
    _add_client_routes(api, service)
    add_checkpoint_routes(api, public, service)
    methods: dict[str, Callable[..., Awaitable[Answer]]] = {
        "create_session": service.create_session,
        "session_heartbeat": service.heartbeat,
        "create_model": service.create_model,
        "get_info": service.get_info,
        "forward_backward": service.forward_backward,
        "optim_step": service.optim_step,
        "save_weights": service.save_weights,
        "save_weights_external": service.save_weights_external,
        "save_weights_for_sampler": service.save_weights_for_sampler,
        "load_weights": service.load_weights,
        "create_sampling_session": service.create_sampling_session,
        "asample": service.sample,
    }
    for name, method in methods.items():
        api.post(f"/{name}")(method)
    api.get("/samplers/{session}")(service.sampler)

    @api.post("/sessions/{session}/finish")
    async def finish(session: str) -> Answer:
        service.check_owner(session)
        return await service.end_session(session, "finished by its client")

    @api.post("/retrieve_future")
    async def retrieve_future(
        request_id: BodyField, wait_s: Annotated[float, Body(embed=True, ge=0)] = POLL_S
    ) -> Response:
        service.check_owner(request_id)
        future = service.requests.future(request_id)
        try:
            done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=min(wait_s, poll_s))
        except asyncio.CancelledError:  # uvicorn cancels waiting requests at the end of the service
            return JSONResponse({"detail": "the service ends"}, 503)
        if not done:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        if future.cancelled():
            raise RequestError("request_id", request_id, "was cancelled, because its session ended", 410)
        service.requests.retrieved(request_id)
        result = future.result()
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    @app.get("/health")
    async def agent_health() -> Answer:  # agents probe it
        return {}

    app.include_router(public)
    app.include_router(api)
    return app


def _add_client_routes(api: APIRouter, service: Service) -> None:
    @api.get("/get_server_capabilities")
    async def capabilities() -> Answer:
        model = {"model_name": service.limits.model, "max_context_length": service.limits.length}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    # Clients use their defaults for every flag that is missing.
    @api.post("/client/config")
    @api.post("/client/dynamic_config")
    async def client_config() -> Answer:
        return {"fwdbwd_max_chunk_bytes_count": TARGET_BYTES * service.limits.pass_tokens}

    @api.post("/telemetry")
    async def telemetry() -> Answer:
        return {"status": "accepted"}  # and dropped


def _answer_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [(".".join(map(str, each["loc"][1:])) or "body", each["msg"]) for each in error.errors()]
        text = "; ".join(f"{field}: {message}" for field, message in problems)
        if isinstance(error.body, dict):
            service.refuse(error.body.get("model_id"), error.body.get("seq_id"), RequestError("request", "", text))
        return JSONResponse({"detail": text}, 400)

    @app.exception_handler(OSError)
    @app.exception_handler(sqlite3.Error)
    async def not_written(_: Request, error: Exception) -> JSONResponse:  # clients ask again for five minutes
        log.error("a request failed: %s", error)
        return JSONResponse({"detail": f"the service cannot use its data directory: {error}"}, 503)

    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: HTTPException) -> JSONResponse:
        why = f"{request.method} {request.url.path}: this service has no such route"
        return JSONResponse({"detail": why if error.status_code in (404, 405) else error.detail}, error.status_code)
