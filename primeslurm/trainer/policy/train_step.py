"""One training step: forward and backward passes over micro batches, gradient clipping, and the optimizer update."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo import utils
from torch.distributed.fsdp import FSDPModule

from primeslurm.nn.layers.vision import VisionInput
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import MAX_SKIPPED, micro_batch_rows
from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.components.loss import Documents, LossFunction, Targets, cross_entropy, from_recipe
from primeslurm.trainer.data.image_positions import read, vision_input
from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.trainer.distributed.world import World, to_device
from primeslurm.trainer.optimizers import optimizers
from primeslurm.trainer.policy.draft_training import DraftTraining
from primeslurm.trainer.policy.flops_meter import FlopsMeter
from primeslurm.trainer.policy.kept_logprobs import KeptLogprobs
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.wire.batches.batch import Batch, BatchInfo, Row, stack

log = logging.getLogger(__name__)
# Number of steps in which recompilations are expected, because new layer kinds and batch shapes appear
WARM_UP_STEPS = 3


class CompilationMetrics:
    """Counts torch.compile's compilations per step over all ranks. While one rank compiles, all others wait."""

    def __init__(self, compiled: bool, world: World) -> None:
        self._compiled = compiled
        self._world = world
        self._steps = 0
        self.clear()

    def clear(self) -> None:
        """Drop torch's records of compilations, so that `take` counts only later ones."""
        utils.clear_compilation_metrics()

    def take(self) -> dict[str, float]:
        """Return the counts and seconds of compilations of the last step, summed over all ranks. A collective."""
        if not self._compiled:
            return {}
        compilations = utils.get_compilation_metrics()  # torch keeps the last 64
        self.clear()
        self._steps += 1
        forward = [each for each in compilations if each.is_forward]
        reasons = [each.recompile_reason for each in forward if each.recompile_reason]
        seconds = sum(each.duration_us or 0 for each in compilations) / 1e6
        if reasons and self._steps > WARM_UP_STEPS:
            log.warning("layers were recompiled in %.1f s: %s", seconds, "; ".join(sorted(set(reasons))))
        # Recompiled graphs had been compiled for other inputs before. The time includes backward graphs.
        counts = torch.tensor([len(forward), len(reasons), seconds], dtype=torch.float32)
        sums = self._world.sum(counts.to(self._world.device)).tolist()
        return dict(zip(("compiles", "recompiles", "compile_s"), sums, strict=True))


class TrainStep:
    """The policy with the recipe's loss, optimizer and schedule. Without an image `reader`, it trains on text only.

    `kept` writes log-probabilities of rollouts in the archive. Without a `meter`, steps have no metrics of operations.
    """

    def __init__(
        self,
        policy: PolicyModel,
        recipe: Recipe,
        world: World,
        reader: ImageReader | None = None,
        loss: LossFunction | None = None,
        kept: KeptLogprobs | None = None,
        meter: FlopsMeter | None = None,
    ) -> None:
        self.policy = policy
        self._settings = trainer = recipe.trainer
        self._loss = loss or (from_recipe(trainer.loss) if recipe.task == "rl" else cross_entropy)
        self._world = world
        self._reader = reader
        self._meter = meter
        self._kept = kept
        self._compilations = CompilationMetrics(policy.compiled, world)
        self.optimizer = optimizers.build(
            trainer.optimizer, policy.model, policy.dtype, trainer.memory.optimizer_state_offload
        )
        self.scheduler = optimizers.schedule(trainer.optimizer, recipe.max_steps, self.optimizer)
        draft_layer = policy.draft_layer
        self.draft_training = DraftTraining(policy, draft_layer, recipe, world) if draft_layer else None
        self._skipped_in_a_row = 0

    def train(self, batch: Batch, timer: PhaseTimer) -> dict[str, float]:
        """Train one step on this rank's rows of a batch. A collective; all ranks must have the same number of rows.

        Returns metrics of the whole batch, the same on every rank. If the gradient is not finite, all ranks leave the
        weights unchanged. The step still counts, and the metric `skipped` is 1. Raises FloatingPointError after
        MAX_SKIPPED such steps in a row, RankError for unreadable images, and ValueError if the rows are for other ranks
        or no reader is there.
        """
        batch = batch.cp_shard(self.policy.cp_rank, self.policy.cp_world)
        tokens = max(1, batch.info.loss_tokens)
        with timer.phase("forward_backward"):
            totals = self._accumulate(batch, tokens)
        with timer.phase("optimizer"):
            lr = self.optimizer.lr
            grad_norm, skipped = self._update(batch.info.step)
            drafts = self.draft_training.update() if self.draft_training else {}
        if self._kept is not None:
            self._kept.write(batch.info.step)
        seconds = timer.seconds("forward_backward") + timer.seconds("optimizer")
        metrics = {name: value / tokens for name, value in totals.items()}
        if on_policy := metrics.get("on_policy_fraction", 0.0):
            metrics["mismatch_kl"] /= on_policy  # a mean over on-policy tokens, not over all tokens
        else:
            metrics.pop("mismatch_kl", None)
        return metrics | {
            **drafts,
            "grad_norm": grad_norm,
            "skipped": float(skipped),
            "lr": lr,
            "tokens": float(tokens),
            "tokens_per_s": tokens / seconds,
            "peak_memory_gb": self._world.peak_memory_bytes() / 1e9,
            "allocation_retries": float(self._world.allocation_retries()),
            **self._compilations.take(),
            **(self._meter.take(seconds) if self._meter else {}),
        }

    @property
    def compiles(self) -> bool:
        """True if layers or kernels are compiled for the first step, which then takes long."""
        return self.policy.compiled or self._world.device.type == "cuda"

    def warm_up(self, batch: Batch) -> None:
        """Compile for batches of this shape: run it forward and backward, and drop the gradients. A collective.

        The state of the run stays as it is: weights, optimizers, buffers, random numbers, counts of metrics.
        """
        device = self._world.device
        buffers = [buffer for part in self.policy.parts for buffer in part.model.buffers()]
        values = [buffer.clone() for buffer in buffers]
        loss, self._loss = self._loss, cross_entropy  # a custom loss may have state
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self._accumulate(batch.cp_shard(self.policy.cp_rank, self.policy.cp_world), batch.info.loss_tokens)
        self._loss = loss
        self.optimizer.zero_grad()
        if self.draft_training is not None:
            self.draft_training.drop()
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)  # routers count the tokens of their experts
        self._compilations.clear()
        if self._meter is not None:
            self._meter.take(1.0)
        self._world.forget_peak_memory()

    def _accumulate(self, batch: Batch, tokens: int) -> dict[str, float]:
        totals: dict[str, torch.Tensor] = {}
        layout, micro_batches = self._settings.parallelism, self._micro_batches(batch)
        first_row = 0
        for number, rows in enumerate(micro_batches, 1):
            liveness().heartbeat()
            if layout.reduce_gradients == "step":
                is_last = number == len(micro_batches)
                for part in self.policy.parts:
                    reduce_after(part.model, last=is_last, stays_gathered=not layout.reshard_after_forward)
            arrays = {name: torch.from_numpy(array) for name, array in stack(rows).items()}
            # If any row of the batch has images, every rank runs the vision encoder in every micro batch, because the
            # encoder's weights are gathered from all ranks.
            images = self._images(rows) if batch.info.has_images else None
            sums, trained = self._micro_batch(arrays, images, batch.info, first_row)
            first_row += len(rows)
            if self._meter is not None:
                self._meter.add(rows, trained, images)
            (sums.loss / tokens).backward()
            for name, value in sums.metrics.items():
                totals[name] = totals[name] + value if name in totals else value
        reduced = self._world.sum(torch.stack(list(totals.values()))).tolist()
        return dict(zip(totals, reduced, strict=True))

    def _micro_batches(self, batch: Batch) -> list[Sequence[Row]]:
        length = len(batch.rows[0].positions)
        default = micro_batch_rows(self._settings.micro_batch_tokens, self.policy.cp_world, length)
        count = batch.info.rows_at_once or default
        return [batch.rows[start : start + count] for start in range(0, len(batch.rows), count)]

    def _images(self, rows: Sequence[Row]) -> VisionInput:
        if self._reader is None:
            raise ValueError("the batch has images, but `model.vlm` is not set")
        reader = self._reader
        images = self._world.attempt(lambda: [read(row, reader) for row in rows], "reading images")
        return vision_input(rows, images, self.policy.model.vision, self._world.device)

    def _micro_batch(
        self, row: dict[str, torch.Tensor], images: VisionInput | None, info: BatchInfo, first_row: int
    ) -> tuple[Any, int]:
        """Return the sums of the loss, and the number of tokens that this rank trains."""
        positions, branches = row.pop("positions"), row.pop("branches", None)
        length = positions.shape[1] // self.policy.cp_world
        # Logits at a position predict the next token, so targets are shifted by one.
        following = {name: _next_token(tensor)[:, :length] for name, tensor in row.items() if tensor.ndim == 2}
        documents = Documents.of(positions, branches)
        targets = Targets(
            labels=following["token_ids"].long(),
            ref_logprobs=following.get("ref_logprobs", torch.zeros_like(following["logprobs"])),
            documents=replace(documents, index=self.policy.shard(documents.index)),
            echo_weights=following.get("echo_weights"),
            **{name: following[name] for name in ("logprobs", "advantages", "temperatures", "on_policy")},
        )
        mask = following["mask"]
        if targets.echo_weights is not None:
            mask = mask | (targets.echo_weights > 0)
        # A next position of 0 starts another document or lies past the end of the row: nothing predicts that token.
        # The first token of a branch belongs to the prompt, so it is not trained.
        mask = mask & (self.policy.shard(_next_token(positions)) != 0)
        tokens = to_device(row["token_ids"][:, :length], self._world.device).long()
        whole_positions = to_device(positions, self._world.device).long()
        routed = to_device(row["routed_experts"][:, :length], self._world.device) if "routed_experts" in row else None
        tree = to_device(branches, self._world.device) if branches is not None and branches.any() else None
        logprobs, entropy, trained = self.policy.score(tokens, whole_positions, mask, targets, routed, images, tree)
        if self._kept is not None:
            self._kept.add(info, first_row, mask, logprobs)
        if self.draft_training is not None:
            self.draft_training.add(row["token_ids"], positions, row["mask"])
        return self._loss(logprobs, entropy, trained), int(mask.sum())

    def _update(self, step: int) -> tuple[float, bool]:
        """Update the weights if the gradient is finite. Return the gradient norm and whether the update was skipped."""
        max_norm, ep_enabled = self._settings.optimizer.max_norm, self.policy.dims.ep_enabled
        norm, updated = optimizers.step(self.optimizer, self.policy.model, max_norm, ep_enabled, self._world)
        if updated:
            self._skipped_in_a_row = 0
        else:
            self._skip(step, norm)
        self.scheduler.step()
        return norm, not updated

    def _skip(self, step: int, norm: float) -> None:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED:
            raise FloatingPointError(
                f"the gradient norm is {norm} in step {step}: no gradient was finite in {MAX_SKIPPED} consecutive steps"
            )
        log.warning("step %d does not update the weights: the gradient norm is %s", step, norm)


def reduce_after(model: torch.nn.Module, *, last: bool, stays_gathered: bool) -> None:
    """Set whether FSDP reduces gradients after the next micro batch, as for the `last` one. If not, they accumulate.

    If `stays_gathered`, weights stay gathered until the last micro batch.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last, recurse=False)
            if stays_gathered:
                module.set_reshard_after_backward(last, recurse=False)


def _next_token(values: torch.Tensor) -> torch.Tensor:
    """Shift values [rows, len] left by one position. The last position becomes 0 or False."""
    return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
