"""The policy as its own teacher: the same answer after a prompt with a hint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from primeslurm.orchestrator.algorithms import from_recipe
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import RolloutError
from primeslurm.orchestrator.teacher import Scoring, teacher_of
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from primeslurm.wire.batches.rollout import TeacherPrompt
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.recipes import recipe_data
from tests.support.rollouts import TwoTurns, rollouts, small_recipe, with_words
from tests.support.scripted_run import publish_addresses
from tests.support.waiting import wait_until_async
from tests.unit.orchestrator.test_scoring import running, teacher

SEQ_LEN = 64
HINT = {"type": "policy", "hint": "answer", "template": "It is {hint}."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def recipe(tokenizer: Path, **teacher: Any) -> Recipe:
    model = {"path": str(tokenizer), "max_len": 2 * SEQ_LEN}
    orchestrator = {"batch_size": 4, "group_size": 2, "request_timeout_s": 60, "advantages": "opd"}
    return small_recipe(tokenizer, model=model, orchestrator=orchestrator, teacher=HINT | teacher)


@pytest.mark.parametrize(("into", "twice"), [("system", False), ("user", True)])
async def test_teacher_prompt_contains_the_hint(tokenizer: Path, tmp_path: Path, into: str, twice: bool) -> None:
    made = recipe(tokenizer, message_role=into)
    done: list[RolloutGroup] = []
    with FakeEngine(tokenizer) as engine:
        engine.version = 3
        found = await rollouts(engine, made, with_words(TwoTurns) if twice else None)
        sampling = len(engine.requests)
        scoring = Scoring(teacher(engine.url), 2, made.seq_len, done.append, longest=made.max_len - 1)
        scoring.add(RolloutGroup("g", "reverse-text", 0, 3, (found,)))
        async with running(scoring, tmp_path):
            await wait_until_async(lambda: done)
        asked = engine.requests[sampling:]
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    (sequence,), (request,) = done[0].rollouts[0], asked
    prompt = sequence.info.teacher_prompt
    assert prompt is not None and prompt.replaces == int(np.flatnonzero(sequence.mask)[0])
    own = fast.decode(sequence.token_ids[: prompt.replaces], skip_special_tokens=False).replace(" ", "")
    told = fast.decode(prompt.token_ids, skip_special_tokens=False).replace(" ", "")
    word = own.removeprefix("<user>Reverse:").removesuffix("<eos><assistant>")
    if into == "system":
        assert told == f"<system>Itis{word[::-1]}.<eos>{own}"
    else:
        assert told == f"<user>Reverse:{word}??Itis{word[::-1]}.<eos><assistant>", "a line break is no token here"
    assert request["prompt"] == [*prompt.token_ids, *sequence.token_ids[prompt.replaces :]]
    assert sequence.info.turns == (2 if twice else 1)
    # the engine says -i / 16 of the token at position i of what it is given
    moved = len(prompt.token_ids) - prompt.replaces
    expected = np.where(sequence.mask, -(np.arange(len(sequence.token_ids)) + moved) / 16, 0)
    assert sequence.ref_logprobs is not None and np.allclose(sequence.ref_logprobs, expected)
    assert scoring.take_metrics()["teacher/unasked_tokens"] == 0
    ((credit,),) = from_recipe(made).assign(done)
    gap = (sequence.ref_logprobs.astype(np.float64) - sequence.logprobs)[sequence.mask]
    assert np.allclose(credit.advantages[sequence.mask], gap), "log p(y | hint) - log p(y), of each sampled token"
    assert RolloutGroup.from_bytes(done[0].to_bytes()).rollouts[0][0].info == sequence.info


async def test_missing_hint_names_the_fields_of_the_task(tokenizer: Path) -> None:
    with FakeEngine(tokenizer) as engine:
        engine.version = 3
        with pytest.raises(RolloutError, match=r"teacher.hint: solution is not in the task, which has answer, "):
            await rollouts(engine, recipe(tokenizer, hint="solution"))


@pytest.mark.parametrize(("longest", "unasked"), [(40, 0), (16, 4), (8, 12)])
async def test_tokens_that_do_not_fit_have_no_teacher_gradient(
    tokenizer: Path, tmp_path: Path, longest: int, unasked: int
) -> None:
    done: list[RolloutGroup] = []
    mask = np.arange(16) >= 4
    ids, logprobs = np.full(16, 7, np.int32), np.where(mask, -0.5, 0).astype(np.float32)
    with FakeEngine(tokenizer) as engine:
        engine.version = 3
        (one,) = await rollouts(engine, recipe(tokenizer))
        info = msgspec.structs.replace(one.info, teacher_prompt=TeacherPrompt([9] * 8, 4))
        one = replace(one, info=info, token_ids=ids, mask=mask, logprobs=logprobs, versions=np.where(mask, 3, -1))
        scoring = Scoring(teacher(engine.url), 2, SEQ_LEN, done.append, longest=longest)
        scoring.add(RolloutGroup("g", "reverse-text", 0, 3, ((one,),)))
        async with running(scoring, tmp_path):
            await wait_until_async(lambda: done)
        assert len(engine.requests[-1]["prompt"]) <= longest
    ((found,),) = done[0].rollouts
    assert found.ref_logprobs is not None
    assert scoring.take_metrics()["teacher/unasked_tokens"] == unasked
    asked = found.ref_logprobs[4 : 16 - unasked]
    assert np.allclose(asked, -np.arange(8, 8 + len(asked)) / 16)
    assert (found.ref_logprobs == found.logprobs)[16 - unasked :].all(), "no gap, no advantage"


def test_policy_teacher_uses_the_runs_engines(tokenizer: Path, tmp_path: Path) -> None:
    names = ["prefill-r0-0", "decode-r0-0"]
    arguments = OrchestratorArguments(tmp_path, 1, "run", "", "", ["router-0"], names)
    urls = {name: f"http://127.0.0.1:{7 + i}" for i, name in enumerate(names)}
    publish_addresses(arguments.attempt_dir, urls)
    assert teacher_of(recipe(tokenizer), arguments)._where() == ["http://127.0.0.1:7/v1"], "prompts are prefill's"
    together = OrchestratorArguments(tmp_path, 1, "run", "", "", ["router-0"], names[1:])
    assert teacher_of(recipe(tokenizer), together)._where() == ["http://127.0.0.1:8/v1"]


def test_engine_urls_leave_out_lost_engines(tmp_path: Path) -> None:
    names = ["engine-r0-0", "engine-r0-1"]
    arguments = OrchestratorArguments(tmp_path, 1, "run", "", "", ["router-0"], names)
    urls = {name: f"http://10.0.0.{i}:8000" for i, name in enumerate([*names, "router-0"])}
    publish_addresses(arguments.attempt_dir, urls, lost=names[1:])
    assert arguments.engine_urls() == {"engine-r0-0": "http://10.0.0.0:8000"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"teacher": HINT | {"template": "It is known."}}, "teacher.template"),
        ({"orchestrator": {"batch_size": 8, "group_size": 4}}, "teacher"),
        ({"teacher": None}, "orchestrator.advantages"),
    ],
)
def test_unsupported_recipes_are_refused(changes: dict[str, Any], field: str) -> None:
    data = recipe_data(orchestrator={"batch_size": 8, "group_size": 4, "advantages": "opd"}, teacher=HINT)
    made = Recipe.model_validate(data | changes)
    assert [violation.field for violation in violations(made)] == [field]
