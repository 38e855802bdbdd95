"""Samples of the trainer's model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from primeslurm.tinker.backbone import Backbone
from primeslurm.tinker.requests import LoraConfig, SamplingParams
from primeslurm.tinker.sampler import TrainerSampler, choose
from tests.trainer.tinker.conftest import make_data, score

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def sampler(backbone: Backbone) -> TrainerSampler:
    return TrainerSampler(backbone)


def test_logprobs_are_those_of_training(backbone: Backbone, sampler: TrainerSampler, tmp_path: Path) -> None:
    adapter = backbone.adapter(LoraConfig(rank=4, seed=1))
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.normal_(std=0.05)
    adapter.save(tmp_path / "weights", optimizer=True)
    params = SamplingParams(max_tokens=5, temperature=0.7, seed=3, stop=[])
    sequences, prompt_logprobs = sampler.sample(tmp_path / "weights", PROMPT, params, 2, scored=len(PROMPT))
    assert prompt_logprobs is not None and np.isnan(prompt_logprobs[0]) and len(prompt_logprobs) == len(PROMPT)
    for reason, tokens, logprobs in sequences:
        assert reason == "length" and len(tokens) == 5
        whole = [*PROMPT, *tokens]
        (datum,) = make_data(1, len(whole) - 1)
        datum.inputs["target_tokens"][:] = whole[1:]
        datum.tokens.setflags(write=True)
        datum.tokens[:] = whole[:-1]
        (expected,), _ = score(backbone, adapter, [datum], "cross_entropy", {}, backward=False)
        assert [*prompt_logprobs[1:], *logprobs] == pytest.approx(expected, abs=5e-6)
    again, _ = sampler.sample(tmp_path / "weights", PROMPT, params, 2, scored=0)
    base, last = sampler.sample(None, PROMPT, params, 2, scored=2)
    assert again == sequences != base, "a seed repeats samples"
    assert last is not None and np.isnan(last[:-2]).all() and not np.isnan(last[-2:]).any()


def test_greedy_samples_and_stops(sampler: TrainerSampler) -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0, stop=[])
    (sequence,), _ = sampler.sample(None, PROMPT, greedy, 1, 0)
    tokens = sequence[1]
    text = sampler._tokenizer.decode(tokens[:3])
    stops: list[list[str] | list[int]] = [[tokens[2]], [text]]
    for stop in stops:
        (stopped,), _ = sampler.sample(None, PROMPT, greedy.model_copy(update={"stop": stop}), 1, 0)
        length = tokens.index(tokens[2]) + 1 if stop == [tokens[2]] else 3
        assert stopped[0] == "stop" and stopped[1] == tokens[:length], "the token that stops is part of the sample"


def test_top_k_and_top_p() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def seen(**params: float) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        return {int(choose(scores, SamplingParams(**params), generator)) for _ in range(200)}  # type: ignore[arg-type]

    assert seen() == {0, 1, 2, 3}
    assert seen(top_k=2) == {0, 1}
    assert seen(top_p=0.6) == {0, 1}
    assert seen(top_p=0.4) == {0}
    assert seen(temperature=0) == {0}


def test_tail_of_the_vocabulary_keeps_its_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.Tensor] = []
    multinomial = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, *a, **k: (drawn.append(p), multinomial(p, *a, **k))[1])
    scores = torch.tensor([[1.0] + [1e-9] * 50]).log()  # in float32, the first probability is already 1
    for params in (SamplingParams(), SamplingParams(top_k=51)):
        choose(scores, params, None)
        assert (drawn.pop() > 0).all()
