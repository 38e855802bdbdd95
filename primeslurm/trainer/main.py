"""Set up one trainer rank from its arguments, run its task, and turn errors into exit codes."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import torch
from transformers import AutoTokenizer

from primeslurm.base import compiled_code, files, logs
from primeslurm.nn import compat
from primeslurm.recipe import Recipe
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.records.events.training import TrainerStarted, TrainerStopped
from primeslurm.records.heartbeats import liveness
from primeslurm.records.journal import Journal
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.data import token_files
from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.trainer.data.sft_data import Conversations
from primeslurm.trainer.distributed.world import RankError, World, bound_memory, host_memory, join
from primeslurm.trainer.loops.rl import RlTask, WeightTransfer
from primeslurm.trainer.loops.sft import SftTask
from primeslurm.trainer.policy.flops_meter import FlopsMeter
from primeslurm.trainer.policy.kept_logprobs import KeptLogprobs
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.background import beside
from primeslurm.trainer.weight_senders.collective_sender import CollectiveTransfer, Sender
from primeslurm.trainer.weight_senders.filesystem_sender import FilesystemTransfer, Publisher
from primeslurm.trainer.weights import model_directory
from primeslurm.trainer.weights.export import published, stored_by_engines
from primeslurm.wire import exit_codes
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink

log = logging.getLogger("primeslurm.trainer")


def run(
    recipe_path: Path, run_dir: Path, attempt: int, orchestrator: str | None, device: str, interrupt: Interrupt
) -> int:
    """Train as rank RANK of WORLD_SIZE. Return the exit code. Expected errors are logged, not raised."""
    rank = os.environ["RANK"]
    logs.configure(f"%(asctime)s trainer {rank} %(levelname)s %(message)s")
    journal = Journal(run_dir / "attempts" / str(attempt), f"trainer-rank-{rank}")
    journal.note_storage_faults()
    journal.write(TrainerStarted(os.getpid()))
    if device == "cuda" and compat.ON_CPU:
        log.error("--device cuda, but torch %s sees no CUDA device", torch.__version__)
        return exit_codes.FAILED
    recipe = Recipe.model_validate_json(files.read_text(recipe_path))
    compiled_code.use()
    limits = PhaseLimits.of(recipe)
    liveness().enter("load", limit_s=limits.long_s)
    world = join(interrupt, limits.control_s, recipe.trainer.memory.optimizer_offload)
    if recipe.colocated and world.device.type == "cuda":
        bound_memory(world.device, recipe.trainer_memory_share)
    try:
        code = _task(recipe, run_dir, attempt, orchestrator, world, journal).run()
    except (RankError, LinkError, FloatingPointError, OSError, ValueError) as error:
        log.error("%s: %s", type(error).__name__, error)
        journal.write(TrainerStopped(reason=str(error)))
        # A restart would resume at the same weights, which have no finite gradient, or reach them again.
        return exit_codes.UNRECOVERABLE if isinstance(error, FloatingPointError) else exit_codes.FAILED
    world.close()
    return code


def _heartbeat_of_loop() -> None:
    # Heartbeats of a thread that sends a policy would hide a training loop that hangs.
    if threading.current_thread() is threading.main_thread():
        liveness().heartbeat()


def _task(
    recipe: Recipe, run_dir: Path, attempt: int, orchestrator: str | None, world: World, journal: Journal
) -> RlTask | SftTask:
    torch.manual_seed(recipe.seed)
    link = None
    if orchestrator:
        link = TrainerLink(orchestrator, on_wait=liveness().heartbeat, empty=host_memory(world.device))
    policy = build(recipe, world)
    reader = None
    if recipe.model.vlm is not None:
        reader = ImageReader(policy.source, model_directory.load_config(policy.source).image_token_id)
    meter = FlopsMeter.of(policy, model_directory.load_config(policy.source), recipe, world)
    kept = KeptLogprobs(run_dir, attempt, world.rank) if recipe.task == "rl" else None
    train_step = TrainStep(policy, recipe, world, reader, kept=kept, meter=meter)
    encoding = published(recipe, stored_by_engines(recipe, policy.stored_fp8, world))
    whole = recipe.commits if recipe.weights.deltas else None
    publisher = Publisher(policy, run_dir, encoding, recipe.weights.keep, world, recipe.sends_adapter, whole)
    saver = Checkpoints(run_dir, attempt, recipe.checkpoint, world, link)
    if recipe.task == "rl":
        if link is None or orchestrator is None:
            raise ValueError("task rl needs --orchestrator")
        transfer: WeightTransfer
        announcing = TrainerLink(orchestrator, on_wait=_heartbeat_of_loop)
        if recipe.weights.transport != "nccl":
            transfer = FilesystemTransfer(publisher, run_dir, recipe.model.path, announcing, world)
        else:
            sender = Sender(policy, encoding, announcing, beside(world), recipe.weights.load_s)
            transfer = CollectiveTransfer(sender, publisher, recipe.max_steps, recipe.model.path, announcing, world)
        return RlTask(recipe, train_step, transfer, saver, world, link, journal)
    if recipe.sft is None:
        raise ValueError("task sft needs an sft section")
    tokenizer = AutoTokenizer.from_pretrained(policy.source)
    data = recipe.sft.data
    conversations = Conversations(Path(data.path), tokenizer, recipe.seq_len, reader, data.train == "all")
    examples = token_files.tokenized(run_dir, conversations, policy.source, world)
    return SftTask(recipe, run_dir, attempt, train_step, publisher, saver, world, examples, journal)
