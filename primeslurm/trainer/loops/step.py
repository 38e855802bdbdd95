"""One optimizer step: micro batches forward and backward, clip, update."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torchtitan.distributed import utils as dist_utils

from primeslurm.nn.layers.vision import VisionInput
from primeslurm.recipe.sections.trainer import Optimizer, micro_batch_rows
from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.assembly.policy_model import PolicyModel
from primeslurm.trainer.components.documents import Documents
from primeslurm.trainer.components.loss import LossFunction, Targets
from primeslurm.trainer.data.image_positions import read, vision_input
from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.trainer.distributed.gradient_reduction import reduce_after
from primeslurm.trainer.distributed.world import World, to_device
from primeslurm.trainer.loops.compilations import Compilations
from primeslurm.trainer.loops.phase_timer import PhaseTimer
from primeslurm.trainer.optimizers import optimizers
from primeslurm.wire.batches.rollouts import Batch, Row, stack

MOST_SKIPPED = 3
"""Steps in a row without a finite gradient, after which training ends. One may be a bad batch; more are the weights."""

log = logging.getLogger(__name__)


class Learner:
    """The policy with its optimizer and schedule.

    Args:
        reader: of images; None if it is trained on text alone.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: Optimizer,
        max_steps: int,
        loss: LossFunction,
        world: World,
        reader: ImageReader | None = None,
    ) -> None:
        self.policy = policy
        self._config = optimizer
        self._loss = loss
        self._world = world
        self._reader = reader
        self._compilations = Compilations(policy.compiled, world)
        self.optimizer = optimizers.build(optimizer, policy.model, policy.dtype, policy.host_states)
        self.scheduler = optimizers.schedule(optimizer, max_steps, self.optimizer)
        self._skipped_in_a_row = 0

    def train(self, batch: Batch, timer: PhaseTimer) -> dict[str, float]:
        """Train on this rank's share of a batch. All ranks call it together, with equally many rows.

        Args:
            batch: this rank's pieces of rows, or whole ones.
            timer: of its phases.

        If the gradient is not finite, the weights stay as they are: the step counts, its batch is used up, and the
        metric `skipped` is 1 instead of 0. All ranks agree on this.

        Returns:
            Metrics over the whole batch, the same on every rank.

        Raises:
            FloatingPointError: the gradient was not finite MOST_SKIPPED times in a row; the weights are unchanged.
            RankError: an image cannot be read, on any rank.
            ValueError: there are images, but nothing that reads them; or rows are cut for other ranks.
        """
        batch = batch.piece(self.policy.cp_rank, self.policy.cp_world)
        tokens = max(1, batch.info.loss_tokens)
        with timer.phase("forward_backward"):
            totals = self._accumulate(batch, tokens)
        with timer.phase("optimizer"):
            lr = self.optimizer.lr
            grad_norm, skipped = self._update(batch.info.step)
        seconds = timer.seconds("forward_backward") + timer.seconds("optimizer")
        metrics = {name: value / tokens for name, value in totals.items()}
        if share := metrics.get("on_policy_fraction", 0.0):
            metrics["mismatch_kl"] /= share
        else:
            metrics.pop("mismatch_kl", None)
        return metrics | {
            "grad_norm": grad_norm,
            "skipped": float(skipped),
            "lr": lr,
            "tokens": float(tokens),
            "tokens_per_s": tokens / seconds,
            "peak_memory_gb": self._world.peak_memory_bytes() / 1e9,
            "allocation_retries": float(self._world.allocation_retries()),
            **self._compilations.take(),
        }

    def _accumulate(self, batch: Batch, tokens: int) -> dict[str, float]:
        totals: dict[str, torch.Tensor] = {}
        layout, micro_batches = self.policy.layout, self._micro_batches(batch)
        for number, rows in enumerate(micro_batches, 1):
            liveness().heartbeat()
            if layout.reduce_gradients == "step":
                last = number == len(micro_batches)
                reduce_after(self.policy.model, last=last, stays_gathered=not layout.reshard_after_forward)
            arrays = {name: torch.from_numpy(array) for name, array in stack(rows).items()}
            # Either all ranks run the encoder or none does: its weights are gathered from all of them.
            sums = self._micro_batch(arrays, self._images(rows) if batch.info.has_images else None)
            (sums.loss / tokens).backward()
            for name, value in sums.metrics.items():
                totals[name] = totals[name] + value if name in totals else value
        reduced = self._world.sum(torch.stack(list(totals.values()))).tolist()
        return dict(zip(totals, reduced, strict=True))

    def _micro_batches(self, batch: Batch) -> list[Sequence[Row]]:
        length = len(batch.rows[0].positions)
        fitting = micro_batch_rows(self.policy.micro_batch_tokens, self.policy.cp_world, length)
        count = batch.info.rows_at_once or fitting
        return [batch.rows[start : start + count] for start in range(0, len(batch.rows), count)]

    def _images(self, rows: Sequence[Row]) -> VisionInput:
        if self._reader is None:
            raise ValueError("the batch has images, but `model.vlm` is not set")
        reader = self._reader
        images = self._world.attempt(lambda: [read(row, reader) for row in rows], "reading images")
        return vision_input(rows, images, self.policy.model.vision, self._world.device)

    def _micro_batch(self, row: dict[str, torch.Tensor], images: VisionInput | None) -> Any:
        positions = row.pop("positions")
        length = positions.shape[1] // self.policy.cp_world
        following = {name: _next_token(tensor)[:, :length] for name, tensor in row.items() if tensor.ndim == 2}
        documents = Documents.of(positions)
        targets = Targets(
            labels=following["token_ids"].long(),
            ref_logprobs=following.get("ref_logprobs", torch.zeros_like(following["logprobs"])),
            documents=replace(documents, index=self.policy.piece(documents.index)),
            echo_weights=following.get("echo_weights"),
            **{name: following[name] for name in ("logprobs", "advantages", "temperatures", "on_policy")},
        )
        mask = following["mask"]
        if targets.echo_weights is not None:
            mask = mask | (targets.echo_weights > 0)
        # A position of 0 starts another document (or is past the row's end): these logits do not predict it.
        mask = mask & (self.policy.piece(_next_token(positions)) != 0)
        tokens = to_device(row["token_ids"][:, :length], self._world.device).long()
        whole = to_device(positions, self._world.device).long()
        routed = to_device(row["routed_experts"][:, :length], self._world.device) if "routed_experts" in row else None
        return self._loss(*self.policy.score(tokens, whole, mask, targets, routed, images))

    def _update(self, step: int) -> tuple[float, bool]:
        """Update the weights, unless the gradient is not finite. Return the gradient's norm and whether it was not."""
        norm = dist_utils.clip_grad_norm_(
            list(self.policy.model.parameters()),
            self._config.max_norm or math.inf,
            foreach=True,
            ep_enabled=self.policy.dims.ep_enabled,
        ).to(self._world.device)
        # The norm is that of all ranks, but a rank that decided for itself would leave the others in a collective.
        bad_ranks = self._world.sum((~norm.isfinite()).float())
        skipped = bool(bad_ranks.item())
        if skipped:
            self._skip(step, norm.item())
        else:
            self._skipped_in_a_row = 0
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm.item(), skipped

    def _skip(self, step: int, norm: float) -> None:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MOST_SKIPPED:
            why = f"no gradient of {MOST_SKIPPED} steps in a row was finite"
            raise FloatingPointError(f"the gradient norm is {norm} in step {step}: {why}")
        log.warning("step %d leaves the weights as they are: its gradient norm, %s, is not finite", step, norm)


def _next_token(values: torch.Tensor) -> torch.Tensor:
    """What each position says about the token after it; the last position has none, and gets 0 or False."""
    return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
