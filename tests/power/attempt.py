"""The parts of a run that write: submission, an attempt (trainer and orchestrator), a requeue.

They are real. Engines and environment workers, which have no disk, are replaced by invented rollouts, and Slurm by an
`sbatch` that accepts every job. Acknowledged writes are noted on another disk, which keeps its power.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import submitit.core.job_environment
from submitit.helpers import DelayedSubmission

from benchmarks.support.ports import free_port
from primeslurm.api import submission
from primeslurm.api.recipes import loading
from primeslurm.node import start_agent
from primeslurm.node.attempt.attempt_end import conclude
from primeslurm.node.attempt.attempt_start import enter
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.pipeline.orchestrator import OrchestratorPipeline
from primeslurm.orchestrator.pipeline.progress import Change, ProgressFile
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.orchestrator.rollouts.worker_pool import RolloutEnded
from primeslurm.records.attempt import StartRecord, pickled_agent
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.records.journal import Journal
from primeslurm.run.directory import RunDirectory, create
from primeslurm.slurm.submission_signals import HeldSignals
from primeslurm.trainer import main as trainer
from primeslurm.trainer.base.interrupt import SIGNAL, Interrupt
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport import secret
from scripts.models import tiny_model

Doing = Callable[[str], AbstractContextManager[None]]
STEPS = 6
PREEMPTED_AFTER = 3
JOB = "7"
_SBATCH = """#!/bin/sh
echo '{"kind": "taken"}' >> "$ACKNOWLEDGED"
echo Submitted batch job 7
"""


@dataclass(frozen=True)
class Place:
    """Paths: the run on the disk whose power is cut, everything else beside it."""

    beside: Path
    runs: Path

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.runs / "power")

    @property
    def pickle(self) -> Path:
        """The pickle from which submitit starts the job; before its first start, the pickle of the submission."""
        named = self.run.path / "submitit" / f"{JOB}_submitted.pkl"
        job = self.run.latest().job()
        return named if named.exists() or job is None else pickled_agent(named.parent, job.submission)

    @property
    def acknowledged(self) -> list[dict[str, Any]]:
        """Acknowledged writes, oldest first."""
        path = self.beside / "acknowledged.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def tell(self, kind: str, **more: Any) -> None:
        """Note that a write was acknowledged."""
        with (self.beside / "acknowledged.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, **more}) + "\n")

    def forget(self) -> None:
        """Start over."""
        (self.beside / "acknowledged.jsonl").unlink(missing_ok=True)


def prepare(place: Place) -> None:
    """Write a user's files (a model, a recipe, a site), and an `sbatch` that accepts every job."""
    tiny_model.write_model(place.beside / "model", "qwen3_moe", hidden=32)
    recipe = {
        "schema": 1,
        "name": "power",
        "max_steps": STEPS,
        "seq_len": 64,
        "model": {"path": str(place.beside / "model"), "dtype": "float32"},
        "environments": [{"id": "reverse-text"}],
        "checkpoint": {"interval": 2},
        "orchestrator": {"batch_size": 8, "group_size": 4, "max_off_policy_steps": STEPS},
        "trainer": {"optimizer": {"lr": 1e-3}},
        "deployment": {"train": {"nodes": 1, "gpus_per_node": 1}, "inference": {"type": "multi_node"}},
    }
    site = {
        "schema": 1,
        "name": "power-site",
        "device": "cuda",
        "runs": str(place.runs),
        "nodes": {
            "control": {"partition": "cpu", "cpus": 8},
            "default": {"partition": "gpu", "gpus": 8, "cpus": 96},
        },
    }
    (place.beside / "recipe.yaml").write_text(json.dumps(recipe))
    (place.beside / "site.yaml").write_text(json.dumps(site))
    sbatch = place.beside / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(_SBATCH)
    sbatch.chmod(0o700)
    os.environ["PATH"] = f"{sbatch.parent}:{os.environ['PATH']}"
    os.environ["ACKNOWLEDGED"] = str(place.beside / "acknowledged.jsonl")


def submit(place: Place) -> None:
    """Submit as `primeslurm submit` does, without asking Slurm for its nodes."""
    loaded = loading.load(place.beside / "recipe.yaml", site=place.beside / "site.yaml")
    plan = loaded.plan()
    attempt = create(loaded.recipe, plan, place.beside / "recipe.yaml", submission._intent(plan, None))
    submission._start(attempt, plan, loaded.render(), HeldSignals())
    place.tell("submitted")


def train(place: Place, start: str, preempt: bool, doing: Doing = nullcontext) -> int:
    """Run one attempt, with the trainer in this thread and the orchestrator in another. Return the trainer's exit code.

    Args:
        preempt: warn the trainer after PREEMPTED_AFTER steps.
        doing: context that is entered while a policy is published, and while a checkpoint is written and committed.
    """
    interrupt = Interrupt()  # before there is any thread
    os.environ |= {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": JOB}
    job = place.run.latest().job()
    assert job is not None
    submitted = job.submission
    start_agent._copy_pickle(place.run.path / "submitit", submitted)
    attempt = enter(place.run, submitted, StartRecord(start, JOB, "", 0.0), wait_s=0.0)
    number = attempt.number
    os.environ[secret.VARIABLE] = secret.read(place.run.path)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    _observe(place, number)
    _divide(doing)
    place.tell("recovering", attempt=number, step=checkpoints.newest(place.run.path) or 0)
    wire = f"tcp://127.0.0.1:{free_port()}"
    arguments = OrchestratorArguments(
        place.run.path, number, place.run.run_id, wire, f"tcp://127.0.0.1:{free_port()}", ["router-0"], []
    )
    failed: list[BaseException] = []

    def orchestrate() -> None:
        try:
            asyncio.run(_orchestrate(arguments, preempt))
        except BaseException as error:  # an error of a thread ends only that thread
            failed.append(error)
            os.kill(os.getpid(), signal.SIGKILL if not isinstance(error, OSError) else SIGNAL)

    threading.Thread(target=orchestrate, daemon=True).start()
    resolved = place.run.path / "recipe.resolved.json"
    code = trainer.run(resolved, place.run.path, attempt.number, wire, "cpu", interrupt)
    if failed:
        raise failed[0]
    return code


def requeue(place: Place) -> None:
    """Write what the head's agent writes when its job is preempted, before it asks Slurm to requeue the job."""
    os.environ |= {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": JOB}
    delayed: Any = DelayedSubmission.load(place.pickle)
    attempt = place.run.latest()
    ending = Ending(Outcome.PREEMPTED, "USR2: time limit or preemption")
    plan, journal = attempt.plan(), Journal(attempt.path, "head")
    delayed.function._head = SimpleNamespace(
        plan=plan, warn=lambda: None, conclude=lambda: conclude(plan, place.run, attempt, ending, journal)
    )
    refused = submitit.core.job_environment._checkpoint(delayed, place.pickle, 9)
    assert not refused, refused
    place.tell("requeued")


async def _orchestrate(arguments: OrchestratorArguments, preempt: bool) -> None:
    from primeslurm.recipe import Recipe

    recipe = Recipe.model_validate_json((arguments.run_dir / "recipe.resolved.json").read_bytes())
    orchestrator = OrchestratorPipeline(recipe, arguments)
    serving = asyncio.create_task(orchestrator.link.serve())
    finishing = asyncio.create_task(orchestrator.run_finalize())
    while not serving.done() and not finishing.done():
        now, dispatch = orchestrator.progress.now, orchestrator.dispatcher
        if now.published is not None:
            dispatch.version = now.published.version
        while job := dispatch.next_job({each.label for each in recipe.environments}):
            orchestrator.take_event(RolloutEnded(job.id, (_rollout(job, dispatch.version),)))
        if preempt and now.done_step >= PREEMPTED_AFTER:
            preempt = False
            os.kill(os.getpid(), SIGNAL)
        await asyncio.sleep(0.01)
    (serving if serving.done() else finishing).result()


def _rollout(job: Job, version: int) -> Rollout:
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(job.id.encode(), digest_size=6).digest(), "little"))
    tokens = 24
    mask = np.arange(tokens) >= 8
    return Rollout(
        RolloutInfo(job.id, job.group, job.environment, job.opened_version, float(rng.random())),
        rng.integers(3, tiny_model.VOCABULARY, tokens, dtype=np.int32),
        mask,
        np.where(mask, -5.0, 0.0).astype(np.float32),
        np.where(mask, version, -1).astype(np.int32),
    )


def _observe(place: Place, number: int) -> None:
    """Note what the parts of an attempt tell others, at that moment."""

    def put(spool: Spool, group: RolloutGroup, original: Any = Spool.put) -> bool:
        done = bool(original(spool, group))
        if done:
            place.tell("group", id=group.id, digest=_digest(group.to_bytes()), version=group.newest_version)
        return done

    async def record(file: ProgressFile, change: Change, original: Any = ProgressFile.record) -> None:
        place.tell("batches", batches=change(file.now).get("batches", {}))
        await original(file, change)
        place.tell("progress", attempt=number, next_step=file.now.next_step, done_step=file.now.done_step)

    def commit(
        directory: Path, step: int, attempt: int, described: Any = (), original: Any = checkpoints.commit
    ) -> Any:
        record = original(directory, step, attempt, described)
        place.tell("committed", attempt=attempt, step=step, record=_digest(repr(record).encode()))
        return record

    def write(publisher: Publisher, version: int, *given: Any, original: Any = Publisher._write) -> Path:
        path = original(publisher, version, *given)
        place.tell("published", version=version)
        return Path(path)

    Spool.put, ProgressFile.record, Publisher._write = put, record, write  # type: ignore[method-assign, assignment]
    checkpoints.commit = commit


def _divide(doing: Doing) -> None:
    """Report what the trainer is doing."""

    def within(owner: type, name: str, part: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*given: Any, **named: Any) -> Any:
            with doing(part):
                return original(*given, **named)

        setattr(owner, name, wrapped)

    within(Publisher, "_write", "publish")
    within(Checkpoints, "_begin", "commit")  # the orchestrator's part of it
    within(Checkpoints, "_write", "commit")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def succeeded(code: int) -> bool:
    """Return whether an attempt ended as it should."""
    if code not in (0, exit_codes.CHECKPOINTED):
        print(f"the trainer ended with {code}", file=sys.stderr)
    return code in (0, exit_codes.CHECKPOINTED)
