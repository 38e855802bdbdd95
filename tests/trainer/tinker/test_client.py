"""The real `tinker` client against the service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import uvicorn

from primeslurm.tinker.backbone import Backbone
from primeslurm.tinker.routes import application
from primeslurm.tinker.sampler import TrainerSampler
from primeslurm.tinker.server import prepare
from primeslurm.tinker.service import Service

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SEQUENCE = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture
def client(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    opened = prepare("127.0.0.1", 0, tmp_path / "data")
    service = Service(opened.store, backbone, TrainerSampler(backbone))
    app = application(service, opened.store.keys)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened.listener]})
    thread.start()
    service_client = tinker.ServiceClient(base_url=opened.url, api_key=opened.key)
    yield service_client
    service_client.close("success").result()
    server.should_exit = True
    thread.join()
    service.close()


def datum(**inputs: Any) -> Any:
    model_input = tinker.ModelInput.from_ints(SEQUENCE[:-1])
    return tinker.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": SEQUENCE[1:], **inputs})


def test_sft_sampling_rl_and_resume(client: Any, backbone: Backbone) -> None:
    (model,) = client.get_server_capabilities().supported_models
    training = client.create_lora_training_client(base_model=model.model_name, rank=8, seed=1).result()
    assert training.get_info().lora_rank == 8
    weights = [0.0, 0.0, *[1.0] * 5]
    adam = tinker.AdamParams(learning_rate=1e-2)
    passes = []
    for _ in range(8):
        passes.append(training.forward_backward([datum(weights=weights)] * 2, "cross_entropy"))
        update = training.optim_step(adam)
    losses = [sent.result().metrics["loss:sum"] for sent in passes]
    assert losses[-1] < losses[0] * 0.8 and update.result().metrics["grad_norm"] > 0

    prompt = tinker.ModelInput.from_ints(SEQUENCE[:3])
    sampling = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
    sampled = sampling.sample(prompt, 2, params, include_prompt_logprobs=True).result()
    first, second = sampled.sequences
    assert len(first.tokens) == 5 and first.tokens == second.tokens and first.sequence_id != second.sequence_id
    whole = SEQUENCE[:3] + first.tokens
    again = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={"target_tokens": whole[1:], "weights": weights},
    )
    (output,) = training.forward([again], "cross_entropy").result().loss_fn_outputs
    logprobs = [*sampled.prompt_logprobs[1:], *first.logprobs]
    assert logprobs == pytest.approx(output["logprobs"].tolist(), abs=5e-6), "the sampled version is the trained one"
    assert sampling.compute_logprobs(prompt).result() == sampled.prompt_logprobs
    base = client.create_sampling_client(base_model=model.model_name).result()
    assert base.compute_logprobs(prompt).result() != sampled.prompt_logprobs

    def squared(_: list[Any], outputs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((output**2).sum() for output in outputs), {"custom:sum": 1.0}  # type: ignore[return-value]

    custom = training.forward_backward_custom([again], squared).result()
    assert custom.metrics["loss:sum"] == pytest.approx(float((output["logprobs"].to_numpy() ** 2).sum()), rel=1e-4)
    training.optim_step(adam).result()
    path = training.save_state("state").result().path
    rollout = datum(logprobs=np.full(7, -3.0, np.float32), advantages=np.linspace(-1, 1, 7, dtype=np.float32))
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    for loss in ("importance_sampling", "ppo", "cispo"):
        one, other = (each.forward_backward([rollout], loss).result() for each in (training, resumed))
        assert one.metrics == other.metrics
    norms = [each.optim_step(adam).result().metrics for each in (training, resumed)]
    assert norms[0] == norms[1]
    topk = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(SEQUENCE[:2]),
        loss_fn_inputs={
            "target_tokens": torch.tensor([[6, 7], [7, 8]]),
            "weights": torch.tensor([[0.0, 1.0], [0.5, 0.5]]),
        },
    )
    assert resumed.forward([topk], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].shape == [2, 2]
    # The client sends this batch in two chunks, the second one first.
    batch = [datum(weights=weights)] * 1024 + [datum(weights=weights[1:])]
    with pytest.raises(tinker.RequestFailedError, match=r"weights\.shape = \[6\]: must be \[7\]"):
        training.forward(batch, "cross_entropy").result()
    saved = training.save_weights_for_sampler("named").result().path
    assert client.create_sampling_client(model_path=saved).result().get_base_model() == model.model_name
