"""The service: sessions, training runs and sampling sessions, and what each request does.

The public methods answer requests. They are coroutines, so that all of them run in the thread of the HTTP server, and
none waits. Model work runs in one worker thread, and passes of several runs are computed together. A training run's
requests are checked there, and errors are results: if the HTTP answer to one chunk of a pass were an error, the client
would never send the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, Request
from safetensors import SafetensorError

from primeslurm.recipe.sections.tenant import LEAST_WEIGHT, MOST_WEIGHT
from primeslurm.run.tenants import user_of
from primeslurm.tinker import requests
from primeslurm.tinker.backbone import Adapter, Backbone, Pass, Scores, saved
from primeslurm.tinker.engine_sampler import EngineSampler
from primeslurm.tinker.queue import Action, InOrder, Requests, Result, Shared, fail, settled
from primeslurm.tinker.requests import (
    WEIGHT,
    CreateModel,
    CreateSession,
    LoadWeights,
    LoraConfig,
    OptimStep,
    RequestError,
    SampleRequest,
    SamplingSession,
    SaveWeights,
)
from primeslurm.tinker.sampler import TrainerSampler
from primeslurm.tinker.store import EPHEMERAL, EXTERNAL, SAMPLER, SCHEME, TRAINING, SavedAdapter, TinkerStore
from primeslurm.tinker.wire import PassRequest, pass_output, sample_output

# A session without a heartbeat for this long has ended [s]. Clients send one every 10 s.
UNRESPONSIVE_S = 900.0

USER: ContextVar[str] = ContextVar("user")
"""User whose HTTP request is answered."""

Answer = dict[str, object]
BodyField = Annotated[str, Body(embed=True)]


@dataclass
class TrainingRun:
    """A client's adapter, and the order of its requests. Only actions use `adapter` and `incomplete`."""

    id: str
    session: str
    lora: LoraConfig
    order: InOrder = field(default_factory=InOrder)
    adapter: Adapter | None = None
    incomplete: str = ""
    """Why the gradient lacks a part, so that it must not be used."""


@dataclass(frozen=True)
class RunPass:
    """A pass that a run requested."""

    run: TrainingRun
    request: PassRequest


class Service:
    """State of the service."""

    def __init__(
        self,
        store: TinkerStore,
        backbone: Backbone,
        sampler: TrainerSampler,
        clock: Callable[[], float] = time.monotonic,
        engines: EngineSampler | None = None,
    ) -> None:
        """Serve the runs in `store`. Samples come from `engines`, or from `sampler` if there are none."""
        self.store, self._backbone, self._sampler, self._clock = store, backbone, sampler, clock
        self._engines = engines
        self.limits = backbone.limits
        self._worker = ThreadPoolExecutor(1, "tinker-model")
        self._owners: dict[str, str] = {}
        """User of each session that was named in a request."""
        self._weights: dict[str, float] = {}
        """Weights of tenants. Those of clients are 1."""
        self.requests = Requests(
            self._worker,
            self,
            user_of=lambda session: self._owners.get(session, session),
            weight=lambda user: self._weights.get(user, 1.0),
        )
        self._runs: dict[str, TrainingRun] = {}
        self._samplers: dict[str, str | None] = {}
        """Checkpoint of each sampling session. None: the base model."""
        self._adapters: dict[str, Future[str]] = {}
        """Name of each sampling session's adapter in requests to engines. The session keeps it while it lives."""
        self._heartbeats: dict[str, float] = {}
        """Time of the last heartbeat of each live session."""
        store.remove_checkpoints(EPHEMERAL)
        store.remove_adapters()

    def close(self) -> None:
        """End the service, after the batch or token that is being computed."""
        self._heartbeats.clear()
        if self._engines:
            self._engines.close()
        self._worker.shutdown(cancel_futures=True)
        self.store.close()

    async def create_session(self, http: Request, request: CreateSession) -> Answer:
        user, weight = http.state.user, (request.user_metadata or {}).get(WEIGHT)
        if user.startswith(user_of("")) and isinstance(weight, int | float) and LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            self._weights[user] = weight
        session = self.store.add_session(user, request.user_metadata, request.display_name)
        self._heartbeats[session] = self._clock()
        note = "This service trains no adapter of the output layer: train_unembed has no effect."
        return {"session_id": session, "info_message": note}

    async def heartbeat(self, session_id: BodyField) -> Answer:
        self._check_session(session_id)
        self._heartbeats[session_id] = self._clock()
        return {}

    async def expire_sessions(self) -> None:
        """End the unresponsive sessions, and remove expired checkpoints."""
        for session, last in list(self._heartbeats.items()):
            if self._clock() - last > UNRESPONSIVE_S:
                await self.end_session(session, f"no heartbeat for {UNRESPONSIVE_S:.0f} s")
        self.remove_expired()

    def remove_expired(self) -> None:
        """Remove expired checkpoints that no sampling session uses, after the loads that were accepted before."""
        self._worker.submit(lambda: self.store.remove_expired(set(self._samplers.values())))

    async def on_worker(self, action: Callable[[], None]) -> None:
        """Do `action` after the model work that was accepted before."""
        await asyncio.wrap_future(self._worker.submit(action))

    def check_owner(self, name: str) -> None:
        """Raise RequestError if a session belongs to another user. `name`: of the session or of what it created."""
        session = name.partition(":")[0]
        if session not in self._owners and (owner := self.store.owner(session)) is not None:
            self._owners[session] = owner
        if self._owners.get(session) not in (None, USER.get(None)):
            raise RequestError("session_id", session, "is unknown", 404)  # as if there were none

    def samplers(self, session: str) -> list[str]:
        """Return the sampling sessions of a live session."""
        return [name for name in self._samplers if name.startswith(f"{session}:")]

    async def end_session(self, session: str, reason: str) -> Answer:
        """Drop everything that a session has in memory. Its named checkpoints stay."""
        self.store.end_session(session, reason)
        self._heartbeats.pop(session, None)
        prefix = f"{session}:"
        _drop(self._runs, prefix)
        _drop(self._samplers, prefix)
        self.requests.forget(session)
        # After the actions of the session, which may add adapters and files.
        self._worker.submit(_drop, self._adapters, prefix)
        self._worker.submit(self.store.remove_checkpoints, EPHEMERAL + prefix)
        self._worker.submit(self.store.remove_adapters, session)
        return {}

    async def create_model(self, request: CreateModel) -> Answer:
        requests.check_base_model(request.base_model, self.limits)
        requests.check_lora(request.lora_config, self.limits)
        return self._add_run(request, request.session_id, request.model_seq_id, request.lora_config)

    async def get_info(self, model_id: BodyField) -> Answer:
        run, name = self._run(model_id), self.limits.model
        data = {"model_name": name, "tokenizer_id": name}
        return {"model_id": run.id, "model_data": data, "is_lora": True, "lora_rank": run.lora.rank, "model_name": name}

    async def forward_backward(self, request: Request) -> Answer:
        run_pass = PassRequest.read(await request.body())
        run = self._run(run_pass.model_id)
        return self._submit(run, run_pass.seq_id, Shared(RunPass(run, run_pass)))

    def fits(self, works: Sequence[RunPass]) -> bool:
        """Return whether passes can share a batch. Longer ones are computed one by one."""
        return self._backbone.fits([each.request.lengths for each in works], [each.run.lora.rank for each in works])

    def cost(self, work: RunPass) -> float:
        return float(sum(work.request.lengths))

    def execute(self, works: Sequence[RunPass]) -> list[Action]:
        """Compute passes of several runs together. Return actions that encode the results, or raise the errors."""
        prepared = [self._prepare(each) for each in works]
        scores = iter(self._score([each for each in prepared if isinstance(each, Pass)]))
        outcomes = [next(scores) if isinstance(each, Pass) else each for each in prepared]
        return [partial(_finish, work, outcome) for work, outcome in zip(works, outcomes, strict=True)]

    def _prepare(self, work: RunPass) -> Pass | Exception:
        request = work.request
        try:
            requests.check_size(request.lengths, self.limits)
            data = request.data(self.limits.length)
            requests.check_pass(data, request.loss, request.config, self.limits)
            check = partial(self._check_live, work.run.session)
            return Pass(_adapter(work.run), data, request.loss, request.config, request.backward, check)
        except Exception as error:
            return error

    def _score(self, passes: list[Pass]) -> list[Scores | Exception]:
        if not passes:
            return []
        try:
            return [*self._backbone.score(passes)]
        except Exception as error:
            if len(passes) == 1:
                return [error]
        # One pass failed, and must not stop the others. The memory that the error held is free here.
        return [self._score([each])[0] for each in passes]

    async def optim_step(self, request: OptimStep) -> Answer:
        run = self._run(request.model_id)

        def step() -> Result:
            adapter, why = _adapter(run), run.incomplete
            run.incomplete = ""
            if why:
                adapter.optimizer.zero_grad()
                raise RequestError("optim_step", "", f"the gradient is incomplete, and was dropped: {why}")
            return {"metrics": adapter.step(request.adam_params)}

        return self._submit(run, request.seq_id, step)

    async def save_weights(self, request: SaveWeights) -> Answer:
        return self._save_named(request, TRAINING)

    async def save_weights_external(self, request: SaveWeights) -> Answer:
        return self._save_named(request, EXTERNAL)

    async def save_weights_for_sampler(self, request: SaveWeights) -> Answer:
        if request.sampling_session_seq_id is None:
            return self._save_named(request, SAMPLER)
        run = self._run(request.model_id)
        session = f"{run.session}:sample:{request.sampling_session_seq_id}"
        self._samplers[session] = path = EPHEMERAL + session

        def save() -> Result:
            self._save(run, path, SAMPLER, request.model_copy(update={"overwrite": True}))
            if self._engines:
                (exported := Future[str]()).set_result(self._export(session, self.store.file(path)))
                self._adapters[session] = exported
            return {"sampling_session_id": session}

        return self._submit(run, request.seq_id, save)

    def _save_named(self, request: SaveWeights, kind: str) -> Answer:
        run = self._run(request.model_id)
        path = f"{SCHEME}{run.id}/{kind}/{request.path}"

        def save() -> Result:
            requests.check_name(request.path)
            return self._save(run, path, kind, request)

        return self._submit(run, request.seq_id, save)

    def _save(self, run: TrainingRun, path: str, kind: str, request: SaveWeights) -> Result:
        exists, adapter, file = self.store.has_checkpoint(path), _adapter(run), self.store.file(path)
        if exists and not request.overwrite:
            why = "there is already a checkpoint of this name, or a deleted one that a sampling session still uses"
            raise RequestError("path", path, why)
        try:
            if kind == EXTERNAL:
                self._backbone.export(adapter, file)
            else:
                adapter.save(file, optimizer=kind == TRAINING)
            self.store.add_checkpoint(path, run.id, request.ttl_seconds, request.user_metadata)
        except (OSError, SafetensorError, sqlite3.Error) as error:
            if not exists:
                self.store.remove_files(path)
            why = f"cannot be saved: {error}. Free space in the service's data directory, then save again"
            raise RequestError("path", path, why) from None
        return {"path": path}

    async def load_weights(self, request: LoadWeights) -> Answer:
        if request.model_id is not None and request.seq_id is not None:
            run = self._run(request.model_id)
            return self._submit(run, request.seq_id, partial(self._load, run, request))
        if request.session_id is None or request.model_seq_id is None:
            raise RequestError("session_id", "", "is missing: name session_id and model_seq_id, or model_id and seq_id")
        self._check_session(request.session_id)
        lora = self._checkpoint(request.path, request.session_id).lora
        return self._add_run(request, request.session_id, request.model_seq_id, lora)

    def _checkpoint(self, path: str, session: str, expired: bool = False) -> SavedAdapter:
        """Return a checkpoint. Raise RequestError if the session's user has none that this service's model can use."""
        checkpoint = self.store.checkpoint(path, self.store.check_session(session), expired)
        if f"/{EXTERNAL}/" in path:
            raise RequestError("path", path, "is in PEFT format, to be downloaded. Name a checkpoint of another kind")
        requests.check_base_model(checkpoint.model, self.limits)
        requests.check_lora(checkpoint.lora, self.limits)
        return checkpoint

    def _load(self, run: TrainingRun, request: LoadWeights, expired: bool = False) -> Result:
        checkpoint = self._checkpoint(request.path, run.session, expired)
        saved, expected = (lora.model_dump(exclude={"seed"}) for lora in (checkpoint.lora, run.lora))
        if saved != expected:
            raise RequestError("path", request.path, f"its adapter is {saved}, but the training run has {expected}")
        _adapter(run).load(checkpoint.file, request.optimizer)
        run.incomplete = ""
        return {"path": request.path, "model_id": run.id}

    async def create_sampling_session(self, request: SamplingSession) -> Answer:
        self._check_session(request.session_id)
        requests.check_base_model(request.base_model or self.limits.model, self.limits)
        checkpoint = request.model_path and self._checkpoint(request.model_path, request.session_id)
        session = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        if self._engines and checkpoint and session not in self._adapters:
            self._adapters[session] = self._worker.submit(self._export, session, checkpoint.file)
        self._samplers[session] = request.model_path
        return {"sampling_session_id": session}

    def _export(self, session: str, file: Path) -> str:
        """Write the adapter in a file for engines. Return its name."""
        self._check_live(session.partition(":")[0])
        try:
            name, directory = self.store.new_adapter(session)
            self._backbone.export(saved(file), directory)
        except (OSError, SafetensorError) as error:
            why = f"cannot be written for engines: {error}. Free space in the service's data directory, then save again"
            raise RequestError("sampling_session_id", session, why) from None
        return name

    async def sampler(self, session: str) -> Answer:
        return {"sampler_id": session, "base_model": self.limits.model, "model_path": self._sampler_path(session)}

    async def sample(self, request: SampleRequest) -> Answer:
        path, params = self._sampler_path(request.sampling_session_id), request.sampling_params
        prompt = [token for chunk in request.prompt.chunks for token in chunk.tokens]
        requests.check_tokens("prompt", prompt, self.limits, params.max_tokens or 1)
        scored = (request.prompt_logprobs_last_n or len(prompt)) if request.prompt_logprobs else 0

        request_id = f"{request.sampling_session_id}:{request.seq_id}"
        ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
        if (engines := self._engines) is not None:
            adapter = self._adapters.get(request.sampling_session_id)
            if path and adapter is None:  # without a name, engines would sample from the base model
                why = "has no weights, because they are not saved yet or saving failed; save them, then sample"
                raise RequestError("sampling_session_id", request.sampling_session_id, why)

            async def ask_engines() -> Result:
                name: str | None = None
                if adapter:
                    name = await asyncio.shield(asyncio.wrap_future(adapter))
                return sample_output(*await engines.sample(name, prompt, params, request.num_samples, scored))

            self.requests.start(request_id, lambda: engines.start(settled(ask_engines())))
            return {"request_id": request_id, "sample_sequence_ids": ids}

        def sample() -> Result:
            if path and not self.store.has_checkpoint(path):
                raise RequestError("path", path, "there is no such checkpoint")
            weights = self.store.file(path) if path else None
            check = partial(self._check_live, request.sampling_session_id.partition(":")[0])
            return sample_output(*self._sampler.sample(weights, prompt, params, request.num_samples, scored, check))

        tokens = request.num_samples * (len(prompt) + (params.max_tokens or self.limits.length))
        self.requests.submit(request_id, sample, cost=tokens)
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def refuse(self, model_id: object, number: object, error: RequestError) -> None:
        """Record that a request of a run could not be parsed, so that later requests do not wait for it."""
        if isinstance(number, int) and isinstance(model_id, str):
            with contextlib.suppress(RequestError):  # there is no such run of this user, or the number is in the past
                self._submit(self._run(model_id), number, partial(fail, error))

    def _add_run(self, request: CreateModel | LoadWeights, session: str, number: int, lora: LoraConfig) -> Answer:
        self._check_session(session)
        model_id = f"{session}:train:{number}"
        if model_id not in self._runs:  # else the client sends the request again
            seed = secrets.randbits(32) if lora.seed is None else lora.seed
            run = TrainingRun(model_id, session, lora.model_copy(update={"seed": seed}))
            self.store.add_run(model_id, session, self.limits.model, run.lora, request.user_metadata)
            self._runs[model_id] = run
        run = self._runs[model_id]

        def create() -> Result:
            run.adapter = self._backbone.adapter(run.lora)
            if isinstance(request, LoadWeights):
                return self._load(run, request, expired=True)  # it had not when the request was accepted
            return {"model_id": model_id}

        self.requests.submit(f"{model_id}:0", create)
        return {"request_id": f"{model_id}:0", "model_id": model_id}

    def _submit(self, run: TrainingRun, number: int, action: Action | Shared) -> Answer:
        """Execute an action when it is its turn."""
        request_id = f"{run.id}:{number}"
        self.requests.submit(request_id, action, number, run.order)
        return {"request_id": request_id, "model_id": run.id}

    def _run(self, model_id: str) -> TrainingRun:
        self.check_owner(model_id)
        if model_id in self._runs:
            return self._runs[model_id]
        why = "is unknown"
        if self.store.has_run(model_id):
            why = "has ended with its session or the service; create a training client from one of its checkpoints"
        raise RequestError("model_id", model_id, why, 404)

    def _sampler_path(self, session: str) -> str | None:
        self.check_owner(session)
        if session not in self._samplers:
            why = "is unknown, or has ended with its session or the service"
            raise RequestError("sampling_session_id", session, why, 404)
        return self._samplers[session]

    def _check_live(self, session: str) -> None:
        """Raise RequestError if a session has ended. The worker calls this between the steps of long work."""
        if session not in self._heartbeats:
            raise RequestError("session_id", session, "has ended")

    def _check_session(self, session: str) -> None:
        self.check_owner(session)
        self.store.check_session(session)
        self._heartbeats.setdefault(session, self._clock())  # it may be from before a restart


def _drop(named: dict[str, Any], prefix: str) -> None:
    """Remove entries whose names have a prefix. Another thread may add entries meanwhile."""
    for name in list(named):
        if name.startswith(prefix):
            del named[name]


def _adapter(run: TrainingRun) -> Adapter:
    if run.adapter is None:
        raise RequestError("model_id", run.id, "its creation failed")
    return run.adapter


def _finish(work: RunPass, outcome: Scores | Exception) -> Result:
    """Return the result of a pass, or raise its error. If a backward pass fails, the gradient is incomplete."""
    if isinstance(outcome, Exception):
        if work.request.backward:
            work.run.incomplete = f"request {work.request.seq_id} failed: {outcome}"
        raise outcome
    logprobs, loss = outcome
    return pass_output(logprobs, {"loss:sum": loss})
