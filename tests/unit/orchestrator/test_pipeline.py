"""The stages of the pipeline, wired as in a run, without workers, engines and a trainer; stalls and the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.pipeline.orchestrator import OrchestratorPipeline, suspect_of_stall
from primeslurm.orchestrator.pipeline.progress import PROGRESS, RunProgress, restore
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.rollouts.worker_pool import RolloutEnded, WorkerDied
from primeslurm.recipe import Recipe
from primeslurm.records.state import EngineRecord
from primeslurm.wire.batches.batch import RankShard
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.link.messages import Answer, GetBatch
from primeslurm.wire.stored import checkpoints
from tests.support.batches import received
from tests.support.fake_engine import FakeEngine, write_tokenizer
from tests.support.recipes import recipe_data
from tests.support.scripted_run import Run, publish_addresses
from tests.unit.orchestrator.test_dispatch import limits, make_dispatcher, rollout, run_all
from tests.unit.orchestrator.test_packing import group

RECIPE = Recipe.model_validate(recipe_data(orchestrator={"batch_size": 8, "group_size": 4}))
LABEL = RECIPE.environments[0].label


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[OrchestratorPipeline]:
    arguments = OrchestratorArguments(tmp_path, 1, "run", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", ["router-0"], [])
    made = OrchestratorPipeline(RECIPE, arguments)
    made.dispatcher.version = 0
    finalizing = asyncio.create_task(made.run_finalize())
    yield made
    finalizing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await finalizing


def dispatched(pipeline: OrchestratorPipeline, count: int) -> list[Job]:
    jobs = [pipeline.dispatcher.next_job({LABEL}) for _ in range(count)]
    assert None not in jobs
    return [job for job in jobs if job is not None]


def end(pipeline: OrchestratorPipeline, jobs: Sequence[Job]) -> None:
    """Let rollouts end, each with its own reward."""
    for number, job in enumerate(jobs):
        pipeline.take_event(RolloutEnded(job.id, rewarded(job, float(number))))


def rewarded(job: Job, reward: float) -> tuple[Rollout, ...]:
    (sequence,) = rollout(job)
    return (replace(sequence, info=msgspec.structs.replace(sequence.info, reward=reward)),)


async def test_rollouts_become_a_recorded_batch_that_is_served(pipeline: OrchestratorPipeline, tmp_path: Path) -> None:
    jobs = dispatched(pipeline, 8)
    end(pipeline, jobs)
    frames = await pipeline.service.handle(GetBatch(1, RankShard(0, 1)))
    assert not isinstance(frames, Answer)
    assert received(frames).info.loss_tokens == 8, "each rollout has two tokens, and the first has no loss"
    groups = sorted({job.group for job in jobs})
    progress = restore(tmp_path, 1)
    assert progress.next_step == 2 and sorted(progress.batches[1]) == groups
    assert sorted(path.stem for path in (tmp_path / "rollouts").glob("*.group")) == groups


async def test_task_that_kills_workers_is_not_sampled_again(pipeline: OrchestratorPipeline) -> None:
    (job,) = dispatched(pipeline, 1)
    pipeline.workers._deaths.guilty[job.task_key] = 2
    pipeline.take_event(WorkerDied(LABEL, 0, [job]))
    assert job.group not in pipeline.dispatcher.open and not pipeline.dispatcher.runs(job.id)
    assert all(other.group != job.group for other in dispatched(pipeline, 4))


CURRENT = EngineRecord("CURRENT")


def test_suspect_is_the_process_that_others_wait_for() -> None:
    dispatch = make_dispatcher(limits())
    engines = {"e0": CURRENT, "e1": CURRENT}
    assert suspect_of_stall(engines, {"a", "b"}, dispatch, None) == "trainer (requests nothing)"
    assert suspect_of_stall(engines, {"a", "b"}, dispatch, 3) == "trainer (has the batch of step 3)"
    jobs = run_all(dispatch)
    in_flight = f"{len(jobs)} rollouts in flight, through http://r0, http://r1"
    assert jobs and suspect_of_stall(engines, {"a", "b"}, dispatch, 3) == in_flight
    assert dispatch.add_unscored(group([1, 1], [0.0, 1.0]))
    assert suspect_of_stall(engines, {"a", "b"}, dispatch, 3) == "teacher (1 groups wait for its log-probabilities)"
    assert suspect_of_stall(engines, {"x"}, dispatch, 3) == "no worker of environment a, b"
    late = {"e0": CURRENT, "e1": EngineRecord("DOWN"), "e2": EngineRecord("STALE")}
    assert suspect_of_stall(late, (), dispatch, 3) == "engines e1 (DOWN), e2 (STALE)"


async def test_orchestrator_waits_for_the_report_of_the_last_commit(tmp_path: Path) -> None:
    """The trainer may take long from the file COMMITTED to its report."""
    model = write_tokenizer(tmp_path / "model")
    with FakeEngine(model) as engine:
        engine.version = 1
        urls = {"router-0": engine.url, "engine-r0-0": engine.url}
        run = Run(tmp_path, model, [], {}, lambda run_dir, version: run_dir, {"max_steps": 1})
        publish_addresses(run.run_dir / "attempts" / "1", urls)
        RunProgress(1, next_step=2, done_step=1).save(run.run_dir / PROGRESS)
        arguments = OrchestratorArguments(run.run_dir, 1, "test-1", run.wire, run.envs, ["router-0"], ["engine-r0-0"])
        recipe = Recipe.model_validate_json(run.recipe.read_bytes())
        running = asyncio.create_task(OrchestratorPipeline(recipe, arguments, linger_s=0.0).run())
        link = run.link()
        await asyncio.to_thread(run.publish, link, 1)
        directory = checkpoints.step_dir(run.run_dir, 1)
        directory.mkdir(parents=True)
        checkpoints.commit(directory, 1, 1)
        assert not (await asyncio.wait({running}, timeout=1))[0]
        await asyncio.to_thread(link.committed, 1)
        await asyncio.wait_for(running, 600)
        link.close()
    assert restore(run.run_dir, 1).committed == 1
