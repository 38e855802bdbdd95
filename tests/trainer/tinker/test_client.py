"""The real `tinker` client against the service."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import uvicorn
from click.testing import CliRunner
from safetensors.torch import load_file
from tinker.cli.commands.checkpoint import cli
from tinker.cli.context import CLIContext
from transformers import AutoModelForCausalLM

from primeslurm.tinker.backbone import Backbone
from primeslurm.tinker.routes import application
from primeslurm.tinker.sampler import TrainerSampler
from primeslurm.tinker.server import prepare
from primeslurm.tinker.service import Service
from primeslurm.tinker.store import FIRST_USER

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SEQUENCE = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture
def client(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    opened = prepare("127.0.0.1", 0, tmp_path / "data")
    monkeypatch.setenv("TINKER_BASE_URL", opened.url)
    monkeypatch.setenv("TINKER_API_KEY", opened.keys[FIRST_USER])
    service = Service(opened.store, backbone, TrainerSampler(backbone))
    app = application(service, {key: user for user, key in opened.keys.items()})
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened.listener]})
    thread.start()
    service_client = tinker.ServiceClient()
    yield service_client
    service_client.close("success").result()
    server.should_exit = True
    thread.join()
    service.close()


def datum(**inputs: Any) -> Any:
    model_input = tinker.ModelInput.from_ints(SEQUENCE[:-1])
    return tinker.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": SEQUENCE[1:], **inputs})


def resumed_logprobs(adapter: Path, base: str) -> list[float]:
    """Return the log-probabilities of the prompt, by transformers with a downloaded adapter."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name, a in tensors.items():
        if "lora_A" in name:
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight.data += config["lora_alpha"] / config["r"] * tensors[name.replace("lora_A", "lora_B")] @ a
    tokens = torch.tensor([SEQUENCE[:3]])
    scores = model(tokens).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, tokens[0, 1:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def test_sft_sampling_rl_and_resume(
    client: Any, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.chdir(tmp_path)
    for arguments in (["list"], ["info", path], ["set-ttl", path, "--ttl", "3600"], ["download", path]):
        result = CliRunner().invoke(cli, arguments, obj=CLIContext(format="json"), catch_exceptions=False)
        assert result.exit_code == 0 and (path in result.output or not result.output), result.output
    assert resumed_logprobs(
        tmp_path / path.removeprefix("tinker://").replace("/", "_"), model.model_name
    ) == pytest.approx(
        client.create_sampling_client(model_path=path).result().compute_logprobs(prompt).result()[1:], abs=5e-5
    )
    saved = training.save_weights_for_sampler("named").result().path
    assert client.create_sampling_client(model_path=saved).result().get_base_model() == model.model_name


def test_recipes_of_the_cookbook(client: Any, backbone: Backbone, tmp_path: Path) -> None:
    sft = pytest.importorskip("tinker_cookbook.recipes.chat_sl.train")
    rl = pytest.importorskip("tinker_cookbook.recipes.math_rl.train")
    lines = [{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}] * 16
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {"model_name": backbone.limits.model, "renderer_name": "qwen3_instruct", "lora_rank": 8, "eval_every": 0}
    common |= {"learning_rate": 1e-2, "max_steps": 4, "save_every": 2}
    config = sft.CLIConfig(
        dataset=str(tmp_path / "sums.jsonl"),
        batch_size=4,
        rolling_save_every=1,
        log_path=str(tmp_path / "sft"),
        **common,
    )
    sft.cli_main(config)
    losses = [line["train_mean_nll"] for line in metrics(tmp_path / "sft")]
    assert len(losses) == 4 and losses[-1] < losses[0]
    # Without arguments, the client would ask the first service of this process.
    rest = tinker.RestClient(base_url=os.environ["TINKER_BASE_URL"], api_key=os.environ["TINKER_API_KEY"])
    names = {each.checkpoint_id for each in rest.list_user_checkpoints().result().checkpoints}
    assert names == {f"{kind}/{name}" for kind in ("weights", "sampler_weights") for name in ("000002", "final")}
    # From the SFT checkpoint, with the renderer that its run recorded.
    loaded = common | {"renderer_name": None, "load_checkpoint_path": last(tmp_path / "sft")}
    config = rl.CLIConfig(
        loss_fn="importance_sampling", groups_per_batch=2, group_size=2, log_path=str(tmp_path / "rl"), **loaded
    )
    asyncio.run(rl.cli_main(config))
    assert sum("env/all/reward/total" in line for line in metrics(tmp_path / "rl")) == 4


def metrics(log_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def last(log_path: Path) -> str:
    checkpoints = (log_path / "checkpoints.jsonl").read_text().splitlines()
    path: str = json.loads(checkpoints[-1])["state_path"]
    return path
