"""A real engine's log-probabilities equal the trainer's, so that on-policy importance ratios are 1."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, Qwen3MoeForCausalLM
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import GenerateEndpoint
from primeslurm.recipe.rules.sampling import EXACT, OFF, is_off
from primeslurm.recipe.sections.losses import DppoLoss
from primeslurm.recipe.sections.orchestrator import COLDEST, HOTTEST, Sampling
from primeslurm.trainer.components.logprobs import logit_scores
from primeslurm.trainer.components.loss import Documents, Targets, from_recipe
from tests.engine.conftest import STATUS_S, StartEngine
from tests.support.models import make_model

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
PROMPT = [2, 5, 9, 14, 7, 3, 21]
TEMPERATURES = (0.3, 1.0, HOTTEST)
REQUESTS, LENGTH = 4, 64


async def test_importance_ratios_of_the_same_policy_are_one(start_engine: StartEngine, tmp_path: Path) -> None:
    """The model's generation config has defaults that would truncate and change the distribution."""
    model = make_model(tmp_path / "model")
    GenerationConfig(
        do_sample=True, top_k=3, top_p=0.8, min_p=0.2, temperature=0.6, repetition_penalty=1.3, eos_token_id=1
    ).save_pretrained(model)
    engine = start_engine(source=model)
    client = EngineClient(lambda: engine.url, str(model), status_timeout_s=STATUS_S)
    await client.apply(PolicyVersion(0, str(model)), timeout_s=600)
    endpoint = GenerateEndpoint(lambda: engine.url, 4096, 300)
    policy = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    function = from_recipe(DppoLoss())
    ranks = []
    try:
        for temperature in TEMPERATURES:
            sampling = {**Sampling(temperature=temperature).model_dump(exclude_none=True), "max_tokens": LENGTH}
            body = {"token_ids": PROMPT, "sampling_params": {**sampling, "ignore_eos": True}}
            for completion in await asyncio.gather(*(endpoint.generate(body, {}) for _ in range(REQUESTS))):
                with torch.no_grad():
                    logits = policy(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1]
                labels = torch.tensor(completion.token_ids)
                ranks += (logits > logits.gather(1, labels[:, None])).sum(1).tolist()
                logprobs, entropy = logit_scores(logits, labels, torch.full((LENGTH,), temperature))
                sums = function(logprobs, entropy, on_policy(labels, completion.logprobs))
                assert sums.metrics["importance_ratio"].item() / LENGTH == pytest.approx(1, abs=1e-5)
                assert abs(sums.metrics["mismatch_kl"].item()) / LENGTH < 1e-6
                assert sums.metrics["impossible_fraction"].item() == 0
    finally:
        await endpoint.close()
    assert max(ranks) > 20, "the tail is drawn, too"


def on_policy(labels: torch.Tensor, engine: list[float]) -> Targets:
    ones = torch.ones(len(labels))
    return Targets(
        labels=labels,
        logprobs=torch.tensor(engine),
        advantages=ones,
        temperatures=ones,
        on_policy=ones.bool(),
        ref_logprobs=torch.zeros(len(labels)),
        documents=Documents(torch.zeros(len(labels), dtype=torch.long), 1),
    )


def test_temperatures_of_training_are_those_of_the_engine() -> None:
    assert SamplingParams(temperature=COLDEST).temperature == COLDEST
    assert SamplingParams(temperature=COLDEST / 2).temperature == COLDEST, "so a recipe must not say less"
    assert SamplingParams(temperature=HOTTEST).temperature == HOTTEST
    with pytest.raises(VLLMValidationError, match="temperature"):
        SamplingParams(temperature=HOTTEST + 0.01)


def test_parameters_of_the_engine_are_off_by_default() -> None:
    """Every allowed parameter exists, and omitting an engine parameter changes nothing."""
    names = set(SamplingParams.__struct_fields__)
    plain = SamplingParams()
    assert {"top_p", "top_k", "repetition_penalty", "n", "thinking_token_budget"} == OFF.keys() <= names
    assert {
        *("max_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "logprobs", "skip_special_tokens")
    } <= EXACT & names
    changing = {
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k", "min_p", "min_tokens"),
        *("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget", "extra_args"),
        *("trace_decode_token_ids", "watermarking"),
    }
    assert changing <= names - EXACT
    assert all(is_off(name, getattr(plain, name)) for name in changing)
