"""Scoring of groups by a teacher over HTTP, with engines that fail and return."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from primeslurm.orchestrator.algorithms import from_recipe
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits
from primeslurm.orchestrator.dispatch.curricula import OUTCOMES, Curricula
from primeslurm.orchestrator.pipeline.progress import RunProgress, recover
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool, SpooledGroup
from primeslurm.orchestrator.teacher import Scoring, Teacher, TeacherError, teacher_of
from primeslurm.orchestrator.telemetry.batch_metrics import batch_metrics
from primeslurm.recipe import Recipe
from primeslurm.records.journal import Journal
from primeslurm.wire.batches.rollout import Rollout
from tests.support.batches import batch_of
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.recipes import recipe_data
from tests.support.scripted_run import publish_addresses
from tests.support.waiting import wait_until_async
from tests.unit.orchestrator.test_packing import group

SEQ_LEN = 32
RECIPE = Recipe.model_validate(
    recipe_data(orchestrator={"advantages": "opd"}, teacher={"type": "engines", "path": "/models/teacher"})
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with FakeEngine(write_tokenizer(tmp_path / "model")) as made:
        yield made


def teacher(*urls: str) -> Teacher:
    return Teacher(lambda: [f"{url}/v1" for url in urls], httpx.AsyncClient(timeout=60))


@contextlib.asynccontextmanager
async def running(scoring: Scoring, journal: Path) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(scoring.run(Journal(journal, "orchestrator")))
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_teacher_returns_log_probabilities(engine: FakeEngine) -> None:
    found = await teacher(engine.url).logprobs([5, 6, 5, 5])
    assert found.dtype == np.float32 and found.tolist() == [0.0, -1 / 16, -2 / 16, -3 / 16]
    (request,) = engine.requests
    assert request == {"prompt": [5, 6, 5, 5], "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}


async def test_teacher_is_asked_until_it_answers(engine: FakeEngine) -> None:
    engine.broken = 1
    gone = "http://127.0.0.1:9"
    several = teacher(gone, engine.url)
    assert (await several.logprobs([5, 6]))[1] == -1 / 16
    await asyncio.gather(*(several.logprobs([5, 6]) for _ in range(8)))  # the one that is gone has the fewest requests
    assert len(engine.requests) == 9
    where: list[str] = []
    later = Teacher(lambda: [*where], httpx.AsyncClient(timeout=60))
    asked = asyncio.create_task(later.logprobs([5, 6]))
    await asyncio.sleep(0.05)
    where.append(f"{engine.url}/v1")
    assert (await asked)[1] == -1 / 16


async def test_refused_request_ends_the_run(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match=r"400.*out of vocabulary"):
        await teacher(engine.url).logprobs([5, 9999])
    scoring = Scoring(teacher(engine.url), 2, SEQ_LEN, lambda group: None)
    whole = group([3], [1.0])
    (branch,) = whole.rollouts[0]
    scoring.add(replace(whole, rollouts=((replace(branch, token_ids=branch.token_ids + 9999),),)))
    with pytest.raises(ExceptionGroup) as caught:
        async with running(scoring, tmp_path) as task:
            await task
    assert caught.group_contains(TeacherError)
    assert '"suspect":"teacher"' in (tmp_path / "events" / "orchestrator.jsonl").read_text().replace(" ", "")


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b'{"error": {"message": "CUDA error"}}',
        b'{"choices": [{"index": 0, "text": "x"}]}',
        b'{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": ',
        b'{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": NaN}}]}]}',
        b'{"choices": [{"prompt_logprobs": [null, {"7": {"logprob": -1}}]}]}',
        b'{"choices": [{"prompt_logprobs": [null]}]}',
    ],
)
async def test_damaged_answer_is_retried_on_another_engine(damaged: bytes) -> None:
    asked: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "bad":
            return httpx.Response(200, content=damaged)
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": [None, {"6": {"logprob": -0.5}}]}]})

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    both = Teacher(lambda: ["http://bad/v1", "http://good/v1"], http, clock=lambda: 0.0)
    assert (await both.logprobs([5, 6])).tolist() == [0.0, -0.5] and asked == ["bad", "good"]
    with pytest.raises(TeacherError, match="no log-probabilities of the prompt"):
        await Teacher(lambda: ["http://bad/v1"], http).logprobs([5, 6])
    assert asked[2:] == ["bad"] * 3


def test_served_teacher_needs_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"type": "served", "base_url": "http://t/v1/", "model": "m", "key_env": "TEACHER_KEY"}
    recipe = Recipe.model_validate(recipe_data(orchestrator={"advantages": "opd"}, teacher=served))
    arguments = OrchestratorArguments(tmp_path, 1, "run", "", "", ["router-0"], ["engine-r0-0"])
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(TeacherError, match="TEACHER_KEY"):
        teacher_of(recipe, arguments)
    monkeypatch.setenv("TEACHER_KEY", "k")
    made = teacher_of(recipe, arguments)
    assert made._http.headers["Authorization"] == "Bearer k" and made._where() == ["http://t/v1"]


def test_teacher_follows_its_engines(tmp_path: Path) -> None:
    arguments = OrchestratorArguments(
        tmp_path, 1, "run", "", "", ["router-0"], ["engine-r0-0"], ["teacher-0", "teacher-1"]
    )
    made = teacher_of(RECIPE, arguments)
    assert made._where() == [], "nothing is published yet"
    publish_addresses(arguments.attempt_dir, {"teacher-1": "http://127.0.0.1:7"})
    assert made._where() == ["http://127.0.0.1:7/v1"], "the other one has no node"


async def test_only_trained_tokens_are_scored(engine: FakeEngine, tmp_path: Path) -> None:
    done: list[RolloutGroup] = []
    scoring = Scoring(teacher(engine.url), 2, SEQ_LEN, done.append)
    whole = group([6, 3 * SEQ_LEN, 2, 2, 2], [1.0, 0.0, 0.5, 0.5, 0.5])
    (first,) = whole.rollouts[0]
    first = replace(first, mask=np.array([False, False, True, True, False, True]))
    whole = replace(whole, rollouts=((first,), *whole.rollouts[1:]))
    assert not whole.scored
    scoring.add(whole)
    async with running(scoring, tmp_path):
        await wait_until_async(lambda: done)
    (found,) = done
    short, long, *_ = (branch.ref_logprobs for (branch,) in found.rollouts)
    assert found.scored and short is not None and long is not None
    assert short.tolist() == [0, 0, -2 / 16, -3 / 16, 0, -5 / 16]
    assert long[:SEQ_LEN].tolist() == [-i / 16 for i in range(SEQ_LEN)] and not long[SEQ_LEN:].any()
    assert engine.busiest == 2 and max(len(request["prompt"]) for request in engine.requests) == SEQ_LEN
    row = scoring.take_metrics()
    assert row["teacher/tokens"] == 6 + SEQ_LEN + 3 * 2 and row["teacher/seconds"] > 0 and row["teacher/waiting"] == 0
    assert scoring.take_metrics()["teacher/tokens"] == 0
    gaps = [(b.logprobs - b.ref_logprobs)[b.mask] for (b,) in found.rollouts if b.ref_logprobs is not None]
    assert batch_metrics([found], 1, SEQ_LEN)["teacher/kl"] == pytest.approx(np.concatenate(gaps).mean())
    assert "teacher/kl" not in batch_metrics([whole], 1, SEQ_LEN)


async def test_dropped_group_is_not_scored(engine: FakeEngine, tmp_path: Path) -> None:
    done: list[RolloutGroup] = []
    engine._delay_s = 30
    scoring = Scoring(teacher(engine.url), 1, SEQ_LEN, done.append)
    groups = [replace(group([3], [1.0]), id=f"g{number}") for number in range(3)]
    async with running(scoring, tmp_path):
        for one in groups:
            scoring.add(one)
        scoring.drop(groups[1:2])  # nobody asks about it yet
        await wait_until_async(lambda: engine.requests)
        engine._delay_s = 0
        scoring.drop([groups[0], group([3], [1.0])])
        await wait_until_async(lambda: done)
    assert [one.id for one in done] == ["g2"]


def test_groups_at_the_teacher_count_as_started_and_expire() -> None:
    fields = {"group_sizes": {"e": 1}, "batch_size": 1, "max_inflight": 1, "max_steps": 9, "ratios": {"e": 1.0}}
    made = Dispatcher(DispatchLimits(max_off_policy_steps=1, **fields), ["router-0"], "run.1", "i")  # type: ignore[arg-type]
    made.version = 0
    whole = replace(group([3], [1.0]), id="e-00000000")
    scored = replace(whole, rollouts=((replace(whole.rollouts[0][0], ref_logprobs=np.zeros(3, np.float32)),),))
    assert made.add_unscored(whole) and made.add_unscored(replace(whole, id="e-00000001"))
    assert made.next_job({"e"}) is None, "two batches are on their way"
    assert made.scored(scored) and [one.scored for one in made.ready] == [True]
    assert not made.scored(scored), "it is at the teacher no longer"
    stale, *_ = made.apply_age_limit(3)
    assert {one.id for one in stale} == {"e-00000000", "e-00000001"} and not made.unscored and not made.ready
    job = made.next_job({"e"})
    assert job is not None and job.group == "e-00000000", "its example comes again"


class Slow:
    """A teacher that answers when it is told to."""

    def __init__(self) -> None:
        self.gate = asyncio.Semaphore(0)
        self.asked = 0

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        self.asked += 1
        await self.gate.acquire()
        return [0.5] * len(token_ids)

    async def close(self) -> None:
        pass


async def test_spooled_groups_are_read_shortly_before_scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, names = Spool(tmp_path / "rollouts"), [f"e-{number:08d}" for number in range(9)]
    for name in names:
        spool.put(replace(group([3, 5], [1.0, 0.0]), id=name))
    read: list[str] = []
    whole = SpooledGroup.whole

    def noted(one: SpooledGroup) -> RolloutGroup:
        read.append(one.id)
        return whole(one)

    monkeypatch.setattr(SpooledGroup, "whole", noted)
    groups = spool.load()
    path = tmp_path / "rollouts" / f"{names[4]}.group"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    asked, done, damaged = Slow(), list[str](), list[str]()
    scoring = Scoring(
        asked,  # type: ignore[arg-type]
        1,
        SEQ_LEN,
        lambda one: done.append(one.id),
        on_damaged=lambda one, why: damaged.append(one.id),
    )
    for one in groups:
        scoring.add(one)

    async with running(scoring, tmp_path):
        await wait_until_async(lambda: asked.asked == 1 and read == names[:1])
        await asyncio.sleep(0.05)
        assert read == names[:1], "two sequences are asked about: the others wait on disk"
        scoring.drop([groups[2]])
        for _ in range(2 * len(names)):
            asked.gate.release()
        await wait_until_async(lambda: len(done) == 7)
        assert done == [name for name in names if name not in (names[2], names[4])]
        assert damaged == [names[4]] and read == [name for name in names if name != names[2]]
        assert scoring.take_metrics()["teacher/waiting"] == 0


def test_spooled_groups_are_restored_with_and_without_scores(tmp_path: Path) -> None:
    arguments = OrchestratorArguments(tmp_path, 1, "run", "", "", ["router-0"], ["engine-r0-0"])
    spool = Spool(tmp_path / "rollouts")
    plain = replace(group([3, 5], [1.0, 0.0]), id="plain")

    def asked(one: Rollout) -> Rollout:
        return replace(one, ref_logprobs=np.arange(len(one.token_ids), dtype=np.float32))

    def newer(one: Rollout) -> Rollout:
        return replace(one, versions=one.versions + 50)

    scored = replace(plain, id="scored", rollouts=tuple((asked(one),) for (one,) in plain.rollouts))
    undone = replace(scored, id="undone", rollouts=tuple((newer(one),) for (one,) in scored.rollouts))
    for one in (plain, scored, replace(scored, id="batch"), replace(plain, id="broken"), undone):
        spool.put(one)
    progress = RunProgress(1, 3, batches={1: ["batch"], 2: ["broken"]})
    batches, curricula = Batches(RECIPE, from_recipe(RECIPE)), Curricula(RECIPE, tmp_path / OUTCOMES)
    made, gone = recover(RECIPE, arguments, progress, spool, batches, curricula)
    assert [one.id for one in made.ready] == ["scored"] and list(made.unscored) == ["plain"]
    assert all(isinstance(one, SpooledGroup) for one in made.unscored.values()), "it is read when it is asked about"
    assert gone == ["undone"] and "undone" in {one.id for one in spool.load()}, "deleted when it is on record"
    again = next(iter(made.ready)).rollouts[1][0].ref_logprobs
    assert again is not None and again.tolist() == [0, 1, 2, 3, 4]
    assert batch_of(batches, 1) is not None and batch_of(batches, 2) is None
    without = RECIPE.model_copy(update={"teacher": None})
    batches = Batches(without, from_recipe(without))
    assert {one.id for one in recover(without, arguments, progress, spool, batches, curricula)[0].ready} == {
        "plain",
        "scored",
    }
