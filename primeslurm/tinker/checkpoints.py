"""HTTP routes that list, delete, copy and download what clients have saved."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Header, Request
from fastapi.responses import FileResponse, Response

from primeslurm.base import durable, files
from primeslurm.tinker.requests import CopyWeights, RequestError, Ttl
from primeslurm.tinker.service import Answer, Service
from primeslurm.tinker.store import EXTERNAL, SCHEME

# A download URL is valid for this long [s]. It needs no API key.
URL_S = 3600


async def _user(request: Request) -> str:
    user: str = request.state.user
    return user


User = Annotated[str, Depends(_user)]
CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


def add_checkpoint_routes(api: APIRouter, public: APIRouter, service: Service) -> None:
    """Add the routes. Users see only their own checkpoints. The routes of `public` need no API key."""
    store = service.store

    async def owned(run: str, kind: str, name: str, user: User) -> str:
        """Return the path of a checkpoint of this user."""
        path = f"{SCHEME}{run}/{kind}/{name}"
        store.checkpoint(path, user)
        return path

    Owned = Depends(owned)

    @api.get("/training_runs")
    async def runs(user: User, limit: int = 20, offset: int = 0) -> Answer:
        names, total = store.runs(user, limit, offset)
        return {"training_runs": [store.run(name, user) for name in names], "cursor": _cursor(limit, offset, total)}

    @api.get("/training_runs/{run}")
    async def run_info(run: str, user: User) -> Answer:
        return store.run(run, user)

    @api.get("/training_runs/{run}/checkpoints")
    async def checkpoints_of_run(run: str, user: User) -> Answer:
        store.run(run, user)
        return {"checkpoints": store.checkpoints(user, run)[0]}

    @api.get("/checkpoints")
    async def checkpoints(user: User, limit: int = 100, offset: int = 0) -> Answer:
        described, total = store.checkpoints(user, None, limit, offset)
        return {"checkpoints": described, "cursor": _cursor(limit, offset, total)}

    @api.delete(CHECKPOINT, status_code=204)
    async def delete(path: str = Owned) -> Response:
        store.set_ttl(path, 0)
        service.remove_expired()
        return Response(status_code=204)

    @api.put(f"{CHECKPOINT}/ttl", status_code=204)
    async def set_ttl(ttl_seconds: Annotated[Ttl, Body(embed=True)], path: str = Owned) -> Response:
        store.set_ttl(path, ttl_seconds)
        return Response(status_code=204)

    @api.post("/weights_info")
    async def weights_info(tinker_path: Annotated[str, Body(embed=True)], user: User) -> Answer:
        saved = store.checkpoint(tinker_path, user)
        lora = saved.lora
        layers = {"train_mlp": lora.train_mlp, "train_attn": lora.train_attn, "train_unembed": False}
        return {"base_model": saved.model, "is_lora": True, "lora_rank": lora.rank, **layers}

    @api.post("/copy_weights")
    async def copy(request: CopyWeights, user: User, x_idempotency_key: str = Header("")) -> Answer:
        source = store.checkpoint(request.source_path, user)
        # A client that sends the request again sends the same key, and gets the same copy.
        key = x_idempotency_key or secrets.token_hex(8)
        session = hashlib.sha256(f"{user} {key}".encode()).hexdigest()[:16]
        run, (_, kind, name) = f"{session}:train:0", request.source_path.removeprefix(SCHEME).split("/")
        path = f"{SCHEME}{run}/{kind}/{name}"

        def copy_files() -> None:
            try:
                for file in store.files(request.source_path):
                    target = store.file(path) / file.name if files.is_dir(source.file) else store.file(path)
                    durable.make_directory(target.parent)
                    durable.write(target, files.read_bytes(file))
            except OSError:
                store.remove_files(path)
                raise

        if not store.has_checkpoint(path):
            await service.on_worker(copy_files)  # where checkpoints are written and removed
            if not store.has_run(run):
                store.add_session(user, name=f"copy of {request.source_path}", session=session)
                store.end_session(session, "it holds only a copy")
                store.add_run(run, session, source.model, source.lora)
            store.add_checkpoint(path, run, request.ttl_seconds)
        return {"tinker_path": path}

    @api.get("/sessions")
    async def sessions(user: User, limit: int = 20, offset: int = 0) -> Answer:
        return {"sessions": store.sessions(user, limit, offset)}

    @api.get("/sessions/{session}")
    async def session_info(session: str, user: User) -> Answer:
        name, metadata, runs = store.session(session, user)
        return {
            "training_run_ids": runs,
            "sampler_ids": service.samplers(session),
            "user_metadata": metadata and json.loads(metadata),
            "display_name": name,
        }

    _add_downloads(api, public, service, owned)


def _add_downloads(api: APIRouter, public: APIRouter, service: Service, owned: Callable[..., Awaitable[str]]) -> None:
    secret = secrets.token_bytes(32)  # the URLs end with the service

    def sign(path: str, expires: int) -> str:
        return hmac.new(secret, f"{expires} {path}".encode(), "sha256").hexdigest()

    @api.get(f"{CHECKPOINT}/external_weights_urls")
    async def urls(request: Request, kind: str, path: str = Depends(owned)) -> Answer:
        if kind != EXTERNAL:
            raise RequestError("path", path, "is no external weights; save them with save_weights_external")
        expires = int(time.time()) + URL_S
        signed = {
            file.name: str(
                request.url_for("download", path=path.removeprefix(SCHEME), file=file.name).include_query_params(
                    expires=expires, signature=sign(path, expires)
                )
            )
            for file in service.store.files(path)
        }
        return {"urls": signed, "expires": datetime.fromtimestamp(expires, UTC).isoformat()}

    @public.get("/downloads/{path:path}/{file}")
    async def download(path: str, file: str, expires: int, signature: str) -> FileResponse:
        if not hmac.compare_digest(signature.encode(), sign(SCHEME + path, expires).encode()) or expires < time.time():
            raise RequestError("signature", "", "is wrong or has expired; ask for new download URLs", 403)
        found = [each for each in service.store.files(SCHEME + path) if each.name == file and files.exists(each)]
        if not found:
            raise RequestError("file", file, "is missing, because its checkpoint was deleted or has expired", 404)
        return FileResponse(found[0])


def _cursor(limit: int, offset: int, total: int) -> Answer:
    return {"limit": limit, "offset": offset, "total_count": total}
