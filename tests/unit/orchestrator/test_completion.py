"""The end of an orchestrator."""

from __future__ import annotations

import asyncio
from pathlib import Path

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.pipeline.orchestrator import OrchestratorPipeline
from primeslurm.orchestrator.pipeline.progress import PROGRESS, RunProgress, restore
from primeslurm.recipe import Recipe
from primeslurm.testbed.fakes.fake_engine import FakeEngine, write_tokenizer
from primeslurm.wire.stored import checkpoints
from tests.support.scripted_run import Run, publish_addresses


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
