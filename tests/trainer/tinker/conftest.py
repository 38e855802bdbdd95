"""One model for all tests, and a service over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from primeslurm.tinker.backbone import Backbone, Pass, Scores
from primeslurm.tinker.requests import Datum
from primeslurm.tinker.routes import application
from primeslurm.tinker.sampler import TrainerSampler
from primeslurm.tinker.service import Service
from primeslurm.tinker.store import FIRST_USER, TinkerStore
from primeslurm.tinker.wire import MESSAGES, encode_datum
from primeslurm.trainer.distributed.world import World

RANK = 16


@pytest.fixture(scope="session")
def backbone(dense_model: Path, world: World) -> Backbone:
    return Backbone(str(dense_model), RANK, world)


@pytest.fixture(scope="session")
def moe_backbone(moe_model: Path, world: World) -> Backbone:
    return Backbone(str(moe_model), RANK, world)


@pytest.fixture
def serve(backbone: Backbone, tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """Start the service on the same data directory. A second call ends the first service."""
    running: list[Service] = []

    def start(**options: Any) -> Api:
        if running:
            running.pop().close()
        store = TinkerStore(tmp_path / "data")
        running.append(Service(store, backbone, TrainerSampler(backbone), **options))
        users = {store.key(user): user for user in (FIRST_USER, "other")}
        return Api(running[0], TestClient(application(running[0], users, poll_s=0.2)), store.key(FIRST_USER))

    yield start
    for service in running:
        service.close()


class Api:
    """A client that sends what the real client sends."""

    def __init__(self, service: Service, http: TestClient, key: str) -> None:
        self.service, self.http, self.key, self.model = service, http, key, service.limits.model

    def post(self, route: str, status: int = 200, **body: Any) -> Any:
        return self._answer(self.http.post(f"/api/v1/{route}", json=body, headers={"X-API-Key": self.key}), status)

    def get(self, route: str, status: int = 200) -> Any:
        return self._answer(self.http.get(f"/api/v1/{route}", headers={"X-API-Key": self.key}), status)

    def delete(self, route: str, status: int = 204) -> Any:
        answer = self.http.delete(f"/api/v1/{route}", headers={"X-API-Key": self.key})
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def send_pass(self, run: str, seq: int, data: list[Datum], status: int = 200, **fields: Any) -> Any:
        message = encode(run, seq, data, **fields)
        headers = {"X-API-Key": self.key, "Content-Type": "application/x-protobuf"}
        return self._answer(self.http.post("/api/v1/forward_backward", content=message, headers=headers), status)

    def result(self, sent: dict[str, Any]) -> Any:
        """Wait for a result. Messages of protobuf are decoded as results of a pass."""
        while True:
            answer = self.http.post(
                "/api/v1/retrieve_future", json={"request_id": sent["request_id"]}, headers={"X-API-Key": self.key}
            )
            if answer.status_code != 408:
                break
        if "protobuf" in answer.headers["content-type"]:
            return MESSAGES["ForwardBackwardOutput"].FromString(answer.content)
        return self._answer(answer, 200)

    def create_run(self, session: str, number: int = 0, rank: int = 8, **config: Any) -> str:
        lora = {"rank": rank, "seed": number, **config}
        sent = self.post(
            "create_model", session_id=session, model_seq_id=number, base_model=self.model, lora_config=lora
        )
        run: str = self.result(sent)["model_id"]
        return run

    def session(self) -> str:
        session: str = self.post("create_session", tags=[])["session_id"]
        return session

    @staticmethod
    def _answer(answer: Any, status: int) -> Any:
        assert answer.status_code == status, answer.text
        return answer.json()


def encode(run: str, seq: int, data: list[Datum], loss: str = "cross_entropy", forward_only: bool = False) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](model_id=run, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    for datum in data:
        encode_datum(message.data.add(), datum)
    encoded: bytes = message.SerializeToString()
    return encoded


def score(backbone: Backbone, *fields: Any, backward: bool) -> Scores:
    """Compute a pass alone."""
    (result,) = backbone.score([Pass(*fields, backward)])
    return result


def make_data(seed: int, *lengths: int, loss: str = "cross_entropy") -> list[Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        inputs: dict[str, Any] = {"target_tokens": rng.integers(3, 128, length)}
        if loss == "cross_entropy":
            inputs["weights"] = rng.random(length, np.float32)
        else:
            inputs["logprobs"] = -4 - rng.random(length, np.float32)
            inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        data.append(Datum(rng.integers(3, 128, length, dtype=np.int32), inputs))
    return data
