"""Traces of a broken or hostile environment. Each costs only its own rollout, with a reason."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers import create_renderer
from renderers.base import load_tokenizer

from primeslurm.models.extending_renderer import extending_config
from primeslurm.orchestrator.rendering.renderer_selection import Rendering
from primeslurm.orchestrator.rollouts.job_protocol import Job, RolloutError
from primeslurm.orchestrator.worker.rollout_validation import RolloutValidator
from primeslurm.orchestrator.worker.trace_sequences import LONGEST_NAME, sequences
from primeslurm.wire.batches.rollout import MAX_METRICS, Rollout, prefill_tag
from tests.support.conversations import Conversation, ScriptedEngine, answering, converse, sampled, write_tokenizer
from tests.unit.fuzz.mutations import SCALAR, fuzzed
from tests.unit.fuzz.test_messages import is_a_rollout, rollout

JOB = Job("j", "g", "e", 0, 3, "r", "s")


@pytest.fixture(scope="module")
def conversation(tmp_path_factory: pytest.TempPathFactory) -> Conversation:
    """Return a conversation with one question and one answer."""
    config = extending_config("qwen3", {})
    model = write_tokenizer(tmp_path_factory.mktemp("qwen3"), config)
    engine = ScriptedEngine([sampled(create_renderer(load_tokenizer(str(model)), config), answering(0))], routed=True)

    async def talk() -> Conversation:
        async with engine.serving():
            return await converse(model, Rendering(config), engine, lambda turn, message: [])

    return asyncio.run(talk())


def trace(conversation: Conversation, **changes: Any) -> Any:
    """Return its trace with other fields, which are not validated when an environment sets them."""
    copy = conversation.trace.model_copy(deep=True)
    for name, value in changes.items():
        object.__setattr__(copy, name, value)
    return copy


class Scored:
    """A value in place of a reward."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_update_between_prefill_and_decode_is_visible_at_the_last_token_of_the_prompt(
    conversation: Conversation,
) -> None:
    (plain,) = sequences(JOB, conversation.trace, conversation.completions, 1.0, False)
    completions = [replace(completion, prefill_version=7) for completion in conversation.completions]
    (tagged,) = sequences(JOB, conversation.trace, completions, 1.0, False)
    (changed,) = np.flatnonzero(tagged.versions != plain.versions)
    assert tagged.versions[changed] == prefill_tag(7) and not tagged.mask[changed] and tagged.mask[changed + 1]
    assert tagged.is_mixed and not plain.is_mixed
    is_a_rollout(Rollout.decode([bytes(part) for part in tagged.encode()]))


BAD_REWARDS = [float("nan"), float("inf"), float("-inf"), 1e300]


@pytest.mark.parametrize("reward", BAD_REWARDS)
def test_invalid_reward_costs_its_rollout(conversation: Conversation, reward: float) -> None:
    assert sequences(JOB, conversation.trace, conversation.completions, 1.0, True)
    with pytest.raises(RolloutError, match="its reward is"):
        sequences(JOB, trace(conversation, rewards={"x": Scored(reward)}), conversation.completions, 1.0, True)


def test_invalid_metrics_are_dropped_and_too_many_cost_the_rollout(conversation: Conversation) -> None:
    given_ = {"nan": float("nan"), "inf": float("inf"), "none": None, "good": 0.5, "x" * 9999: 1.0}
    found = sequences(JOB, trace(conversation, metrics=given_), conversation.completions, 1.0, False)
    assert found[0].info.metrics == {"good": 0.5, "x" * LONGEST_NAME: 1.0}
    many = {str(i): 0.0 for i in range(MAX_METRICS + 1)}
    with pytest.raises(RolloutError, match="it has 1001 metrics"):
        sequences(JOB, trace(conversation, metrics=many), conversation.completions, 1.0, False)


@fuzzed()
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "rewards": st.dictionaries(st.just("x"), SCALAR.map(Scored)) | SCALAR,
            "metrics": st.dictionaries(st.text(max_size=3), SCALAR, max_size=3) | SCALAR,
        },
    ),
    st.lists(st.tuples(st.sampled_from(["token_ids", "mask", "logprobs", "routed_experts"]), SCALAR), max_size=2),
    st.integers(0, 5),
    st.booleans(),
)
def test_any_trace_becomes_a_rollout_or_an_error(
    conversation: Conversation, changes: dict[str, Any], nodes: list[tuple[str, Any]], place: int, whole: bool
) -> None:
    found = trace(conversation, **changes)
    for name, value in nodes:
        node = found.nodes[place % len(found.nodes)]
        old = getattr(node, name)
        object.__setattr__(node, name, value if whole or old is None else [*list(old)[:-1], value])
    try:
        made = sequences(JOB, found, conversation.completions, 1.0, True)
    except MemoryError:
        raise
    except Exception:  # JobRunner handles these and sends them as the job's result
        return
    for each in made:
        is_a_rollout(Rollout.decode([bytes(part) for part in each.encode()]))


def config(directory: Path, **more: Any) -> RolloutValidator:
    """Return the config of a model with 3 layers."""
    about = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    about |= {"num_hidden_layers": 3, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
    (directory / "config.json").write_text(json.dumps({**about, "num_experts_per_tok": 2, **more}))
    return RolloutValidator(str(directory))


def test_tokens_with_repeated_experts_are_unknown_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first layer has no experts. A layer beyond the model's belongs to a draft model."""
    plausible = config(tmp_path, mlp_only_layers=[0])
    routed = np.tile(np.array([0, 7], np.uint8), (6, 4, 1))
    routed[:, 0] = routed[:, 3] = 0
    assert plausible.checked(known := replace(rollout(), routed_experts=routed)) is known
    missing = routed.copy()
    missing[[0, 3, 5]] = 255  # the last token is never routed
    assert plausible.checked(replace(rollout(), routed_experts=missing)).info.unknown_experts == 2
    zeros = routed.copy()
    zeros[[1, 4], 2] = 0
    for _ in range(2):
        found = plausible.checked(replace(rollout(), routed_experts=zeros))
        assert found.info.repeated_experts == 2 and found.routed_experts is not None
        assert (found.routed_experts[[1, 4]] == 255).all()
        assert np.array_equal(found.routed_experts[[0, 2, 3, 5]], routed[[0, 2, 3, 5]])
        assert (zeros[1, 2] == 0).all(), "the engine's array is not changed"
    assert caplog.text.count("repeated experts for 2 of 6 tokens") == 1


def test_unknown_tokens_and_experts_cost_their_rollout(tmp_path: Path) -> None:
    plausible, good = config(tmp_path), replace(rollout(), routed_experts=None)
    unknown = np.full((6, 3, 2), 255, np.uint8)
    known = np.tile(np.array([0, 7], np.uint8), (6, 3, 1))
    assert plausible.checked(good) is good
    for experts in (unknown, known, np.concatenate([known[:5], unknown[:1]])):
        plausible.checked(replace(good, routed_experts=experts))
    with pytest.raises(RolloutError, match="token 100 is not in the vocabulary, which has 100"):
        plausible.checked(replace(good, token_ids=np.array([0, 1, 2, 3, 4, 100], np.int32)))
    with pytest.raises(RolloutError, match="beyond the 8"):
        plausible.checked(replace(good, routed_experts=np.where(known == 7, 8, known).astype(np.uint8)))
    for shape in ((6, 2, 2), (6, 3, 3)):
        with pytest.raises(RolloutError, match="but the model has 3 x 2"):
            plausible.checked(replace(good, routed_experts=np.zeros(shape, np.uint8)))
    assert RolloutValidator(str(tmp_path / "nowhere")).checked(good) is good
    assert config(tmp_path, num_attention_heads="x").checked(good) is good
