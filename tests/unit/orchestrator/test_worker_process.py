"""An environment worker as its agent starts it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.recipe import Recipe
from primeslurm.testbed.fakes.fake_engine import FakeEngine, write_tokenizer
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.transport import secret
from tests.support.worker_pools import CallbackPool

PATIENCE_S = 280.0


async def test_worker_reports_its_node_and_clears_its_scratch_directory(tmp_path: Path) -> None:
    attempt, disk = tmp_path / "run" / "attempts" / "1", tmp_path / "disk"
    attempt.mkdir(parents=True)
    old = disk / "environments" / "reverse-text-3"
    for name in (old / "workdir", disk / "environments" / "reverse-text-4"):
        name.mkdir(parents=True)
    fields = {"schema": 1, "name": "r", "seq_len": 64, "model": {"path": str(write_tokenizer(tmp_path / "model"))}}
    made = Recipe.model_validate({**fields, "environments": [{"id": "reverse-text", "workers": 5}]})
    (tmp_path / "recipe.json").write_text(made.model_dump_json(by_alias=True))
    results: list[object] = []
    taken = (lambda _, outcome: results.append(outcome), results.append, lambda *why: results.append(why))
    pool = CallbackPool(f"ipc://{tmp_path}/envs", *taken)
    serving = asyncio.create_task(pool.serve())
    with FakeEngine(tmp_path / "model") as engine:
        engine.version = 0
        host, port = engine.url.removeprefix("http://").split(":")
        addresses = {"hosts": {"router-0": host}, "ports": {"router-0": {"http": int(port)}}}
        (attempt / "addresses.json").write_text(json.dumps(addresses))
        argv = ["--recipe", tmp_path / "recipe.json", "--environment", "reverse-text", "--worker", "3", "--node", "7"]
        argv += ["--orchestrator", f"ipc://{tmp_path}/envs", "--attempt-dir", attempt]
        base = {name: value for name, value in os.environ.items() if name != secret.VARIABLE}
        with secret.handing_over(secret.own()) as (descriptor, told):
            worker = subprocess.Popen(
                [sys.executable, "-m", "primeslurm.orchestrator.worker.main", *map(str, argv)],
                env={**base, **told, "TMPDIR": str(disk)},
                pass_fds=(descriptor,),
            )
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not pool.available and not results:
                    await asyncio.sleep(0.05)
                assert not results and pool._nodes.keys() == {"7"} and pool._live.keys() == {("reverse-text", 3)}
                assert not (old / "workdir").exists() and (disk / "environments" / "reverse-text-4").is_dir()
                await pool.send(Job("j", "g", "reverse-text", 0, 0, "router-0", "x.1:0"))
                while not results:
                    await asyncio.sleep(0.05)
        finally:
            worker.kill()
            worker.wait()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    ((rollout,),) = results
    assert isinstance(rollout, Rollout) and rollout.info.environment == "reverse-text"
    assert [path.name for path in attempt.iterdir()] == ["addresses.json"], "nothing on the shared file system"
