"""The service over HTTP: order, retries, errors, sessions and restarts."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from primeslurm.tinker import store as store_module
from primeslurm.tinker.backbone import Pass
from primeslurm.tinker.requests import WEIGHT, CreateSession, Datum, RequestError
from primeslurm.tinker.service import UNRESPONSIVE_S
from primeslurm.tinker.store import TinkerStore
from tests.trainer.tinker.conftest import Api, make_data

Serve = Callable[..., Api]
PARAMS = {"learning_rate": 1e-2}


@pytest.fixture
def api(serve: Serve) -> Api:
    return serve()


def train(api: Api, run: str, first: int, *steps: int) -> list[float]:
    """Train from sequence number `first` on, and return the losses."""
    losses = []
    for index, step in enumerate(steps):
        sent = api.send_pass(run, first + 2 * index, make_data(step, 5, 9))
        update = api.post("optim_step", model_id=run, seq_id=first + 2 * index + 1, adam_params=PARAMS)
        losses.append(api.result(sent).metrics[0].value)
        assert api.result(update)["metrics"]["grad_norm"] > 0
    return losses


def test_requests_run_once_and_in_order(api: Api) -> None:
    session = api.session()
    run, other = api.create_run(session, 0), api.create_run(session, 1)
    # The client may send the chunks of a pass in any order. This one skips the first, which the others wait for.
    update = api.post("optim_step", model_id=run, seq_id=2, adam_params=PARAMS)
    pending = api.http.post("/api/v1/retrieve_future", json=update, headers={"X-API-Key": api.key})
    assert (pending.status_code, pending.json()["type"]) == (408, "try_again")
    assert len(train(api, other, 1, 1)) == 1, "another client does not wait"
    sent = [api.send_pass(run, 1, make_data(1, 5, 9)) for _ in range(2)]
    assert sent[0] == sent[1] and api.result(sent[0]) == api.result(sent[1])
    norm = api.result(update)["metrics"]["grad_norm"]
    assert norm == pytest.approx(expected_norm(api, session), abs=5e-6), "the retried pass counts once"


def expected_norm(api: Api, session: str) -> float:
    run = api.create_run(session, 2, seed=0)
    api.send_pass(run, 1, make_data(1, 5, 9))
    norm: float = api.result(api.post("optim_step", model_id=run, seq_id=2, adam_params=PARAMS))["metrics"]["grad_norm"]
    return norm


@pytest.mark.parametrize(
    ("memory", "ranks", "expected"),
    [(99, 512, [6]), (3, 512, [6, 2, 2, 2]), (99, 16, [4, 2])],
    ids=["enough_memory", "out_of_memory", "large_rank"],
)
def test_waiting_passes_of_several_runs_are_computed_together(
    api: Api, monkeypatch: pytest.MonkeyPatch, memory: int, ranks: int, expected: list[int]
) -> None:
    session, go, batches = api.session(), threading.Event(), list[int]()
    backbone = api.service._backbone
    logprobs = backbone.logprobs

    def recorded(rows: Sequence[Sequence[Datum]]) -> torch.Tensor:
        batches.append(len(rows))
        if len(rows) > memory:
            raise MemoryError
        return logprobs(rows)

    monkeypatch.setattr(backbone, "logprobs", recorded)
    monkeypatch.setattr("primeslurm.tinker.rows.STACKED_RANKS", ranks)
    *runs, broken = [api.create_run(session, number, rank=4 + 4 * (number % 3)) for number in range(4)]
    api.service._worker.submit(go.wait, 10)
    sent = [api.send_pass(run, 1, make_data(number, 5, 9)) for number, run in enumerate(runs)]
    wrong = api.send_pass(broken, 1, make_data(1, 5), loss="dro")
    updates = [api.post("optim_step", model_id=run, seq_id=2, adam_params=PARAMS) for run in runs]
    go.set()
    losses = [api.result(each).metrics[0].value for each in sent]
    norms = [api.result(each)["metrics"]["grad_norm"] for each in updates]
    assert "loss_fn = dro" in api.result(wrong)["error"]
    assert batches == expected
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        run = api.create_run(session, 10 + number, rank=4 + 4 * number, seed=number)
        assert api.result(api.send_pass(run, 1, make_data(number, 5, 9))).metrics[0].value == pytest.approx(loss)
        update = api.result(api.post("optim_step", model_id=run, seq_id=2, adam_params=PARAMS))
        assert update["metrics"]["grad_norm"] == pytest.approx(norm)


def changed(change: Callable[[Datum], None]) -> list[Datum]:
    (datum,) = make_data(1, 5)
    copy = Datum(datum.tokens.copy(), {name: array.copy() for name, array in datum.inputs.items()})
    change(copy)
    return [copy]


@pytest.mark.parametrize(
    ("data", "fields", "words"),
    [
        (make_data(1, 5), {"loss": "dro"}, "loss_fn = dro: is not supported; supported: cross_entropy"),
        (make_data(1, 5), {"loss": "ppo"}, "data[0].loss_fn_inputs.advantages: is missing"),
        ([], {}, "data: is empty"),
        (make_data(1, *[8192] * 8, 1), {}, "data = 65537 tokens: one pass may have 65536 tokens"),
        (make_data(1, 5, 8193), {}, "data[1].model_input = 8193 tokens: the model's longest sequence has 8192"),
        (changed(lambda d: d.tokens.put(2, 128)), {}, "data[0].model_input = 128: is no token of the model"),
        (changed(lambda d: d.inputs["target_tokens"].put(2, -1)), {}, "loss_fn_inputs.target_tokens = -1: is no token"),
        (changed(lambda d: d.inputs["weights"].put(2, np.nan)), {}, "weights: has a value that is not finite"),
        (changed(lambda d: d.inputs.update(weights=np.ones(4, np.float32))), {}, "weights.shape = [4]: must be [5]"),
        (
            changed(lambda d: d.inputs.update({name: np.ones((5, 33), it.dtype) for name, it in d.inputs.items()})),
            {},
            "a token may have 32 targets",
        ),
        (
            changed(lambda d: d.inputs.update(weights=np.ones(5, np.int64))),
            {},
            "weights.dtype = int64: must be float32",
        ),
        (
            changed(lambda d: d.inputs.update(mask=np.ones(5, np.float32))),
            {},
            "mask: is no input of loss cross_entropy",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_pass_is_refused(api: Api, data: list[Datum], fields: dict[str, Any], words: str) -> None:
    run = api.create_run(api.session())
    error = api.result(api.send_pass(run, 1, data, **fields))
    assert words in error["error"] and error["category"] == "user"
    update = api.post("optim_step", model_id=run, seq_id=2, adam_params=PARAMS)
    assert "the gradient is incomplete" in api.result(update)["error"], "a part of the batch is missing"
    assert len(train(api, run, 3, 1)) == 1, "the run goes on"


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("create_model", {"lora_config": {"rank": 32}}, 400, "lora_config.rank = 32: the largest rank of this service"),
        ("create_model", {"lora_config": {"rank": 0}}, 400, "lora_config.rank: Input should be greater than 0"),
        ("create_model", {"base_model": "gpt"}, 400, "base_model = gpt: this service has only"),
        ("create_model", {"optimizer_config": {"type": "dimuon"}}, 400, "optimizer_config.type: Input should be"),
        ("create_model", {"session_id": "none"}, 404, "session_id = none: is unknown"),
        ("get_info", {"model_id": "none"}, 404, "model_id = none: is unknown"),
        ("optim_step", {"adam_params": {"beta1": 1}}, 400, "adam_params.beta1: Input should be less than 1"),
        ("save_weights", {"path": "../x"}, 200, "path = ../x: a name has"),
        ("load_weights", {"path": "tinker://x"}, 200, "path = tinker://x: there is no such checkpoint"),
        ("load_weights", {"path": "tinker://x", "model_id": None}, 404, "there is no such checkpoint"),
        ("asample", {"sampling_session_id": "none"}, 404, "sampling_session_id = none: is unknown"),
        ("asample", {"num_samples": 0}, 400, "num_samples: Input should be greater"),
        ("asample", {"sampling_params": {"stop": ""}}, 400, "sampling_params.stop: Value error, an empty string"),
        ("asample", {"sampling_params": {"stop": ["a", ""]}}, 400, "stop: Value error, an empty string"),
        ("asample", {"topk_prompt_logprobs": 3}, 400, "topk_prompt_logprobs: Input should be 0"),
        ("retrieve_future", {"request_id": "none"}, 410, "request_id = none: is unknown"),
        ("retrieve_future", {"request_id": "none", "wait_s": -1}, 400, "wait_s: Input should be greater than or equal"),
        (
            "save_weights_external",
            {"age_encryption_recipients": ["age1"]},
            400,
            "age_encryption_recipients: Input should",
        ),
        ("save_weights", {"ttl_seconds": 60}, 400, "ttl_seconds: Input should be greater than or equal to 3600"),
        ("create_custom_loss", {}, 404, "POST /api/v1/create_custom_loss: this service has no such route"),
    ],
)
def test_wrong_request_is_refused(api: Api, route: str, body: dict[str, Any], status: int, words: str) -> None:
    session = api.session()
    run = api.create_run(session)
    sampler = api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0)["sampling_session_id"]
    of_run = route in ("optim_step", "save_weights", "save_weights_external", "load_weights")
    valid = {
        "session_id": session,
        "seq_id": 1,
        "model_seq_id": 5,
        "base_model": api.model,
        "lora_config": {"rank": 8},
        "path": "name",
        "optimizer": True,
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"tokens": [5]}]},
        "sampling_params": {},
        "adam_params": {},
    }
    body = valid | ({"model_id": run} if of_run else {}) | body
    answer = api.post(route, status, **body)
    assert words in (api.result(answer)["error"] if status == 200 else answer["detail"])
    assert len(train(api, run, 1 + (of_run and body["model_id"] == run), 1)) == 1, "the run goes on"


def test_clients_split_their_data_into_passes_that_are_accepted(api: Api) -> None:
    (datum,) = make_data(1, 8192)
    config = api.post("client/config")
    size = datum.tokens.nbytes + sum(array.nbytes for array in datum.inputs.values())
    assert config["fwdbwd_max_chunk_bytes_count"] // size * 8192 == api.service.limits.pass_tokens


def test_wrong_key_is_refused(api: Api) -> None:
    for key in ("", "tml-other"):
        answer = api.http.post("/api/v1/create_session", json={}, headers={"X-API-Key": key})
        assert answer.status_code == 401 and "TINKER_API_KEY" in answer.json()["detail"]
    assert api.http.get("/api/v1/healthz").json() == {"status": "ok"}


def test_restart_keeps_key_sessions_and_checkpoints(serve: Serve) -> None:
    api = serve()
    session = api.session()
    run = api.create_run(session)
    train(api, run, 1, 1)
    path = api.result(api.post("save_weights", model_id=run, seq_id=3, path="one"))["path"]
    assert path == f"tinker://{run}/weights/one"
    again = api.result(api.post("save_weights", model_id=run, seq_id=4, path="one"))
    assert "already a checkpoint" in again["error"] and again["category"] == "user"
    losses = train(api, run, 5, 2, 3)

    restarted = serve()
    assert restarted.key == api.key
    answer = restarted.post("retrieve_future", 410, request_id=f"{run}:8")
    assert "the service restarted" in answer["detail"]
    answer = restarted.send_pass(run, 9, make_data(1, 5), 404)
    assert "create a training client from one of its checkpoints" in answer["detail"]
    sent = restarted.post("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
    resumed = restarted.result(sent)["model_id"]
    assert train(restarted, resumed, 1, 2, 3) == losses


def test_refused_chunk_of_a_pass_waits_for_the_first(api: Api) -> None:
    run = api.create_run(api.session())
    second = api.send_pass(run, 2, make_data(1, 5), loss="dro")  # clients send the first chunk last
    first = api.send_pass(run, 1, make_data(1, 5))
    assert api.result(first).metrics[0].value > 0 and "loss_fn = dro" in api.result(second)["error"]


def test_sampling_a_rank_above_the_services_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session = api.session()
    run = api.create_run(session, rank=16)
    path = api.result(api.post("save_weights_for_sampler", model_id=run, seq_id=1, path="one"))["path"]
    monkeypatch.setattr(api.service, "limits", replace(api.service.limits, rank=8))
    fields = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    answer = api.post("create_sampling_session", 400, **fields)
    assert "rank = 16: the largest rank of this service is 8 (primeslurm tinker serve --max-rank)" in answer["detail"]


def test_long_work_of_an_ended_session_stops(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session, computing, ended = api.session(), threading.Event(), threading.Event()
    sampler = api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0)["sampling_session_id"]
    steps = []

    def next_logits(rows: torch.Tensor) -> torch.Tensor:
        steps.append(rows)
        computing.set()
        assert ended.wait(600)
        return torch.zeros(len(rows), 128)

    monkeypatch.setattr(api.service._backbone, "next_logits", next_logits)
    sample = {"sampling_session_id": sampler, "sampling_params": {"stop": []}, "prompt": {"chunks": [{"tokens": [5]}]}}
    sent = [api.post("asample", seq_id=number, **sample) for number in (0, 1)]
    running = api.service.requests.future(sent[0]["request_id"])
    assert computing.wait(600)
    api.post(f"sessions/{session}/finish")
    ended.set()
    assert "has ended" in running.result(600)["error"]  # type: ignore[call-overload]
    api.service.close()
    assert len(steps) == 1
    assert "its session ended" in api.post("retrieve_future", 410, request_id=sent[1]["request_id"])["detail"]


def test_poll_for_a_cancelled_request_ends(api: Api) -> None:
    run = api.create_run(api.session())
    update = api.post("optim_step", model_id=run, seq_id=2, adam_params=PARAMS)  # waits for number 1
    api.service.requests.future(update["request_id"]).cancel()
    assert "was cancelled" in api.post("retrieve_future", 410, request_id=update["request_id"])["detail"]


def test_poll_at_the_end_of_the_service_is_answered(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    run = api.create_run(api.session())
    monkeypatch.setattr(asyncio, "wait", cancelled)
    assert "the service ends" in api.post("retrieve_future", 503, request_id=f"{run}:0")["detail"]


def test_ended_session_stops_a_pass_between_batches(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    run = api.service._runs[api.create_run(api.session())]
    monkeypatch.setattr("primeslurm.tinker.rows.BATCH_TOKENS", 5)
    checks = iter([None, None, RequestError("session_id", "", "has ended")])

    def check() -> None:
        if error := next(checks):
            raise error

    with pytest.raises(RequestError, match="has ended"):
        api.service._backbone.score([Pass(run.adapter, make_data(1, 5, 5, 5), "cross_entropy", {}, True, check)])  # type: ignore[arg-type]
    assert all(p.grad is None for p in run.adapter.parameters.values())  # type: ignore[union-attr]


def test_prompt_of_the_longest_sequence_is_scored(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(api.service.limits, length=4)
    monkeypatch.setattr(api.service, "limits", limits)
    session = api.session()
    sampler = api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0)["sampling_session_id"]
    sample = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [5, 6, 7, 8]}]}, "prompt_logprobs": True}
    api.post("asample", seq_id=0, sampling_params={"max_tokens": 1}, **sample)
    answer = api.post("asample", 400, seq_id=1, sampling_params={"max_tokens": 2}, **sample)
    assert "4 tokens and 2 to sample: the model's longest sequence has 4" in answer["detail"]


def test_sessions_expire_without_requests(serve: Serve) -> None:
    now = 0.0
    api = serve(clock=lambda: now)
    session = api.session()
    now = UNRESPONSIVE_S + 1
    with api.http:  # starts the application's own tasks
        assert "no heartbeat" in api.post("session_heartbeat", 410, session_id=session)["detail"]


def test_session_without_heartbeat_ends(serve: Serve) -> None:
    now = 0.0
    api = serve(clock=lambda: now)
    lost, alive = api.session(), api.session()
    run, other = api.create_run(lost), api.create_run(alive)
    adapter = weakref.ref(api.service._runs[run].adapter)
    save = {"model_id": run, "seq_id": 1}
    sampler = api.result(api.post("save_weights_for_sampler", **save, sampling_session_seq_id=0))["sampling_session_id"]
    now = UNRESPONSIVE_S - 1
    api.post("session_heartbeat", session_id=alive)
    api.post("get_info", model_id=run)
    now = UNRESPONSIVE_S + 1
    asyncio.run(api.service.expire_sessions())
    assert adapter() is None, "its memory is free"
    assert "has ended with its session" in api.post("get_info", 404, model_id=run)["detail"]
    sample = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {}, "seq_id": 0}
    api.post("asample", 404, sampling_session_id=sampler, **sample)
    assert "no heartbeat" in api.post("session_heartbeat", 410, session_id=lost)["detail"]
    assert len(train(api, other, 1, 1)) == 1


def test_disk_full_while_saving_leaves_nothing(api: Api) -> None:
    run = api.create_run(api.session())
    saved = {name: {"path": "one"} for name in ("save_weights", "save_weights_external", "save_weights_for_sampler")}
    saved["save_weights_for_sampler"] = {"sampling_session_seq_id": 0}  # type: ignore[dict-item]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, (route, fields) in enumerate(saved.items()):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            error = api.result(api.post(route, model_id=run, seq_id=3 * number + 1, **fields))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "cannot be saved" in error["error"] and "Free space" in error["error"]
        assert not list(api.service.store._directory.rglob("*one*")) + list(api.service.store._directory.rglob("*.tmp"))
        saved_as = api.result(api.post(route, model_id=run, seq_id=3 * number + 2, **fields))
        path = saved_as.get("path") or f"{store_module.EPHEMERAL}{saved_as['sampling_session_id']}"
        before = [file.read_bytes() for file in api.service.store.files(path)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            again = api.result(api.post(route, model_id=run, seq_id=3 * number + 3, overwrite=True, **fields))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "cannot be saved" in again["error"]
        assert [file.read_bytes() for file in api.service.store.files(path)] == before, "the earlier one remains"
        api.service.store.remove_checkpoints("tinker://")


def test_users_list_copy_and_delete_their_checkpoints(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(store_module, "time", SimpleNamespace(time=lambda: now))
    session = api.post("create_session", display_name="mine", user_metadata={"a": "b"})["session_id"]
    run = api.create_run(session)
    for number, fields in enumerate(({"path": "kept"}, {"path": "short", "ttl_seconds": 3600}), 1):
        api.result(api.post("save_weights", model_id=run, seq_id=number, **fields))
    weights = f"training_runs/{run}/checkpoints/weights"
    assert api.get(f"training_runs/{run}")["last_checkpoint"]["checkpoint_id"] == "weights/short"
    assert api.get("training_runs?limit=1")["cursor"] == {"limit": 1, "offset": 0, "total_count": 1}
    assert api.get(f"sessions/{session}") | {"sampler_ids": []} == {
        "training_run_ids": [run],
        "sampler_ids": [],
        "user_metadata": {"a": "b"},
        "display_name": "mine",
    }
    body = {"source_path": f"tinker://{run}/weights/short"}
    api.http.headers["X-Idempotency-Key"] = "same"  # the client sends the request twice
    (copied,) = {api.post("copy_weights", **body)["tinker_path"] for _ in range(2)}
    other = Api(api.service, api.http, api.service.store.key("other"))
    assert other.get("checkpoints")["checkpoints"] == other.get("sessions")["sessions"] == []
    foreign = {"session_id": other.session(), "model_seq_id": 0, "optimizer": True, "path": copied}
    assert "there is no such checkpoint" in other.post("load_weights", 404, **foreign)["detail"]
    assert "no such checkpoint" in other.delete(f"{weights}/kept", 404)["detail"]
    # The path of a checkpoint shows the session, which is no secret.
    mine = {"session_id": session, "model_path": f"tinker://{run}/weights/kept", "sampling_session_seq_id": 5}
    other.post("create_sampling_session", 404, **mine)
    other.post("load_weights", 404, session_id=session, model_seq_id=7, path=copied, optimizer=True)
    other.post("save_weights", 404, model_id=run, seq_id=3, path="theirs")
    other.post("save_weights", 400, model_id=run, seq_id=3, path="theirs", ttl_seconds="none")
    again = {"path": "short", "ttl_seconds": 3600, "overwrite": True}
    assert "error" not in api.result(api.post("save_weights", model_id=run, seq_id=3, **again))
    other.post("retrieve_future", 404, request_id=f"{run}:1")
    other.post("session_heartbeat", 404, session_id=session)
    other.post(f"sessions/{session}/finish", 404)
    api.post("session_heartbeat", session_id=session)

    now += 3601
    api.service.remove_expired()
    paths = [each["tinker_path"] for each in api.get("checkpoints")["checkpoints"]]
    assert paths == [copied, f"tinker://{run}/weights/kept"]
    assert api.post("weights_info", tinker_path=copied)["lora_rank"] == 8
    loaded = api.post("load_weights", session_id=session, model_seq_id=1, path=copied, optimizer=True)
    api.delete(f"{weights.replace(run, copied.split('/')[2])}/short")
    assert "error" not in api.result(loaded), "it was accepted before the deletion"
    api.service._worker.submit(int).result(600)
    assert not api.service.store.file(copied).exists() and api.service.store.file(paths[1]).exists()
    for url in ("downloads/x/y?expires=9999999999&signature=no", f"{weights}/kept/external_weights_urls"):
        api.get(url, 403 if "signature" in url else 400)


def test_deleted_checkpoint_stays_until_its_sampling_sessions_end(api: Api) -> None:
    session = api.session()
    run = api.create_run(session)
    path = api.result(api.post("save_weights_for_sampler", model_id=run, seq_id=1, path="used"))["path"]
    fields = {"session_id": session, "model_path": path}
    sampler = api.post("create_sampling_session", sampling_session_seq_id=0, **fields)["sampling_session_id"]
    api.delete(f"training_runs/{run}/checkpoints/sampler_weights/used")
    assert api.get(f"training_runs/{run}/checkpoints")["checkpoints"] == []
    api.post("create_sampling_session", 404, sampling_session_seq_id=1, **fields)
    sample = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}, "seq_id": 0}
    future = api.service.requests.future(api.post("asample", sampling_session_id=sampler, **sample)["request_id"])
    assert isinstance(future.result(600), bytes)
    again = api.result(api.post("save_weights_for_sampler", model_id=run, seq_id=2, path="used"))
    assert "a deleted one that a sampling session still uses" in again["error"]
    api.post(f"sessions/{session}/finish")
    asyncio.run(api.service.expire_sessions())
    api.service._worker.submit(int).result(600)
    assert not api.service.store.file(path).exists()


@pytest.mark.parametrize("error", [sqlite3.OperationalError("disk is full"), RuntimeError("a fault of the service")])
def test_expiry_goes_on_after_an_error(serve: Serve, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    now, end_session = 0.0, TinkerStore.end_session
    api = serve(clock=lambda: now)
    session = api.session()
    now, failed = UNRESPONSIVE_S + 1, threading.Event()

    def end(*values: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise error
        end_session(*values)

    monkeypatch.setattr(TinkerStore, "end_session", end)
    monkeypatch.setattr("primeslurm.tinker.routes.EXPIRY_S", 0.01)
    with api.http:
        while session in api.service._heartbeats:
            api.http.get("/api/v1/healthz")
    assert failed.is_set()


class NamedSamples:
    """Engines that record which adapter each request names."""

    def __init__(self) -> None:
        self.names: list[str | None] = []
        self._thread = ThreadPoolExecutor(1)

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return self._thread.submit(asyncio.run, work)

    async def sample(self, name: str | None, *_: object) -> tuple[list[Any], None]:
        self.names.append(name)
        return [("stop", [5], [-1.0])], None

    def close(self) -> None:
        self._thread.shutdown()


@pytest.mark.parametrize("failing", ["add_checkpoint", "new_adapter"])
def test_sample_of_weights_that_are_not_saved_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    engines = NamedSamples()
    api = serve(engines=engines)
    session = api.session()
    run = api.create_run(session)
    sample = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}}

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(api.service.store, failing, full)
        sent = api.post("save_weights_for_sampler", model_id=run, seq_id=1, sampling_session_seq_id=0)
        assert "no space left" in api.result(sent)["error"]
    sampler = f"{session}:sample:0"
    refused = api.post("asample", 400, sampling_session_id=sampler, seq_id=0, **sample)
    assert "has no weights" in refused["detail"] and engines.names == []
    again = api.post("save_weights_for_sampler", model_id=run, seq_id=2, sampling_session_seq_id=0)
    assert api.result(again)["sampling_session_id"] == sampler
    sent = api.post("asample", sampling_session_id=sampler, seq_id=1, **sample)
    assert isinstance(api.service.requests.future(sent["request_id"]).result(600), bytes)
    assert engines.names == [api.service._adapters[sampler].result()]


def test_end_of_a_session_keeps_what_the_worker_adds_for_others(serve: Serve) -> None:
    api = serve(engines=NamedSamples())
    ended, session = api.session(), api.session()
    run, saving, go = api.create_run(session), threading.Event(), threading.Event()
    export = api.service._export

    def slow(*values: Any) -> str:
        saving.set()
        assert go.wait(600)
        return export(*values)

    api.service._export = slow  # type: ignore[method-assign]
    sent = api.post("save_weights_for_sampler", model_id=run, seq_id=1, sampling_session_seq_id=0)
    assert saving.wait(600)
    adapters = api.service._adapters
    api.post(f"sessions/{ended}/finish")
    go.set()
    assert "error" not in api.result(sent)
    assert api.service._adapters is adapters and [*adapters] == [f"{session}:sample:0"]
    api.post(f"sessions/{session}/finish")
    api.service._worker.submit(int).result(600)
    assert not adapters


def test_only_tenants_have_weights(serve: Serve) -> None:
    service = serve().service
    sent = [("tenant.alice", 2.0), ("bob", 2.0), *(("tenant.carol", weight) for weight in (10**400, 1e-306, "2"))]
    for user, weight in sent:
        http: Any = SimpleNamespace(state=SimpleNamespace(user=user))
        asyncio.run(service.create_session(http, CreateSession(user_metadata={WEIGHT: weight})))
    assert service._weights == {"tenant.alice": 2.0}
