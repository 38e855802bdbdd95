"""The training loop of a tenant: ask for a batch, train, announce the new adapter, report, checkpoint.

A checkpoint of the run names a checkpoint of the Tinker service, which has the adapter and its optimizer. The service
keeps nothing else on disk. So each start of the trainer begins a new session, and loads the newest committed
checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from primeslurm.base import durable, files
from primeslurm.base.durable import retry_until_written
from primeslurm.recipe import Recipe
from primeslurm.records.attempt import require_newest
from primeslurm.records.events.training import (
    CheckpointCommitted,
    CheckpointLoaded,
    CheckpointSetAside,
    StepSkipped,
    StepTrained,
    TrainerStopped,
    WeightsPublished,
)
from primeslurm.run.tenants import SESSIONS_FILE
from primeslurm.tenants.step import TenantStep
from primeslurm.tenants.tinker_client import MissingError, TinkerClient
from primeslurm.tinker.store import EXTERNAL, SCHEME
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.batch import Batch, RankShard
from primeslurm.wire.link.trainer_link import TrainerLink
from primeslurm.wire.stored import checkpoints

log = logging.getLogger(__name__)
# File in a checkpoint of the run, with the path of the service's checkpoint
RECORD = "trainer/tinker"
# Key of the metadata of this run's checkpoints in the service
_RUN = "primeslurm_run"


@dataclass
class TenantTask:
    """The training loop."""

    recipe: Recipe
    run_dir: Path
    attempt: int
    client: TinkerClient
    link: TrainerLink
    timer: PhaseTimer
    interrupted: Callable[[], bool]

    def __post_init__(self) -> None:
        self._step = TenantStep(self.recipe, self.client)
        self._journal = self.timer.journal
        self._announced = 0  # newest version that was announced in this attempt
        self._saved = 0
        self._stored: set[str] = set()  # paths of this run's checkpoints in the service

    def run(self) -> int:
        """Train until max_steps, until the orchestrator stops the run, or until an interrupt. Return the exit code."""
        step = self._resume()
        interrupted = False
        while step < self.recipe.max_steps and not interrupted:
            with self.timer.phase("wait"):
                require_newest(self.run_dir, self.attempt)
                timeout_s = self.recipe.trainer.batch_wait_s
                batch = self.link.get_batch(step + 1, RankShard(0, 1), timeout_s, self.interrupted)
            if batch is None:
                interrupted = self.interrupted()
                break
            step += 1
            self._train(step, batch)
            if self.recipe.commits(step):
                self._save(step)
        if step > self._saved:
            self._save(step)
        self.client.finish(self.client.session)
        self._journal.write(TrainerStopped(step, "interrupted" if interrupted else "finished"))
        return exit_codes.CHECKPOINTED if interrupted else 0

    def _resume(self) -> int:
        with self.timer.phase("load"):
            assert self.recipe.tenant is not None  # checked at the start
            model = self.client.open(self.recipe.name, self.recipe.tenant.weight)
            if Path(model).resolve() != Path(self.recipe.model.path).resolve():
                why = f"the Tinker service has {model}; use that path"
                raise ValueError(f"model.path = {self.recipe.model.path}: {why}")
            mine, everything = str(self.run_dir), self.client.checkpoints()
            self._stored = {c["tinker_path"] for c in everything if (c["user_metadata"] or {}).get(_RUN) == mine}
            sessions = {path.removeprefix(SCHEME).partition(":")[0] for path in self._stored}
            for session in sessions:
                self.client.finish(session)  # of a killed trainer: its adapter would stay in the service's memory
            durable.write_json(self.run_dir / SESSIONS_FILE, sorted({*sessions, self.client.session}))
            step = self._load(model)
        self.timer.step = self._saved = step
        self._journal.write(CheckpointLoaded(step))
        with self.timer.phase("publish"):
            path = self._export(step) if step else self.recipe.model.path
            self._announced = retry_until_written(lambda: self.link.announce(step, path))
        if step:  # the process that committed this checkpoint may have been killed before it announced it
            self._announce_commit(step)
        return step

    def _load(self, model: str) -> int:
        """Create the training run from the newest checkpoint, and return its step; 0 for a new adapter."""
        while step := checkpoints.set_damaged_aside(self.run_dir, self.attempt, self._note_damage):
            if (path := self._recorded(step)) in {each["tinker_path"] for each in self.client.checkpoints()}:
                self.client.load(path)
                return step
            why = f"the Tinker service has no checkpoint {path}"
            self._note_damage(step, why, checkpoints.set_aside(self.run_dir, step, self.attempt, [why]))
        lora = self.recipe.trainer.lora
        assert lora is not None  # a rule of the recipe
        self.client.create(model, lora.rank, self.recipe.seed)
        return 0

    def _note_damage(self, step: int, reason: str, path: Path) -> None:
        self._journal.write(CheckpointSetAside(step, reason, str(path)))

    def _train(self, step: int, batch: Batch) -> None:
        self.timer.step = step
        metrics = self._step.train(batch, self.timer)
        with self.timer.phase("publish"):
            # An announced version must not change, even if a resumed trainer repeats its step.
            if step > self._announced:
                path = self._export(step)
                self._announced = retry_until_written(lambda: self.link.announce(step, path))
            self._journal.write(WeightsPublished(step))
            self._prune()
        metrics |= self.timer.take(0)
        self.link.step_done(step, metrics)
        if metrics["skipped"]:
            self._journal.write(StepSkipped(step, str(metrics["grad_norm"])))
        self._journal.write(StepTrained(step, metrics["loss"], metrics["off_policy_kl"]))
        log.info("step %d: %s", step, "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))

    def _export(self, version: int) -> str:
        """Write the adapter for the deployment's engines, and return its directory."""
        assert self.recipe.tenant is not None  # checked at the start
        path = self._store(f"v{version:06d}", external=True)
        return str(Path(self.recipe.tenant.adapters) / path.removeprefix(SCHEME))

    def _store(self, name: str, *, external: bool) -> str:
        """Save the adapter in the service, and return the path of its checkpoint there."""
        path = self.client.save(name, {_RUN: str(self.run_dir)}, external=external)
        self._stored.add(path)
        return path

    def _save(self, step: int) -> None:
        """Commit a checkpoint, or raise. The service's part comes first: a committed checkpoint names it."""
        with self.timer.phase("checkpoint"):
            require_newest(self.run_dir, self.attempt)
            path = self._store(f"step_{step:06d}", external=False)
            retry_until_written(partial(self._commit, step, path))
            self._saved = step
            self._announce_commit(step)
            self._prune()
        self._journal.write(CheckpointCommitted(step))

    def _commit(self, step: int, path: str) -> None:
        directory = checkpoints.step_dir(self.run_dir, step)
        checkpoints.clear(directory)
        self._journal.sync()
        self.link.save(step, str(directory))
        durable.make_directory((directory / RECORD).parent)
        durable.write(directory / RECORD, path)
        checkpoints.commit(directory, step, self.attempt)

    def _announce_commit(self, step: int) -> None:
        needed = retry_until_written(lambda: self.link.committed(step))
        retry_until_written(lambda: checkpoints.prune(self.run_dir, self.recipe.checkpoint.keep, needed))

    def _prune(self) -> None:
        """Delete exported versions beyond `weights.keep`, and checkpoints that no checkpoint of the run names."""
        steps = checkpoints.committed(self.run_dir)
        needed = {self._recorded(step) for step in steps}
        exports: dict[int, list[str]] = {}
        obsolete = []
        for path in self._stored:
            if f"/{EXTERNAL}/" in path:
                exports.setdefault(int(path.rpartition("/v")[2]), []).append(path)
            elif path not in needed:
                obsolete.append(path)
        newest = sorted(exports)[-self.recipe.weights.keep :]
        kept = {*newest, *steps, self._announced}
        obsolete += [path for version, paths in exports.items() if version not in kept for path in paths]
        for path in obsolete:
            with contextlib.suppress(MissingError):  # a repeated request
                self.client.delete(path)
            self._stored.discard(path)

    def _recorded(self, step: int) -> str:
        """Return the path of the service's part of a checkpoint."""
        return files.read_text(checkpoints.step_dir(self.run_dir, step) / RECORD)
