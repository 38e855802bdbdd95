"""Metrics of a step's speed: tokens per second and GPU, TFLOP/s per GPU, and model FLOPs utilization (MFU)."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from primeslurm.models.flops import Work, draft_flops, flops
from primeslurm.models.hf_config import shape_of
from primeslurm.models.shape import ModelShape
from primeslurm.nn.layers.vision import VisionInput
from primeslurm.recipe import Recipe
from primeslurm.trainer.components.lora import is_adapter
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.wire.batches.batch import Row

log = logging.getLogger(__name__)


class FlopsMeter:
    """Counts the model's operations. `models.flops` states the convention.

    Args:
        shape: The model. None: its operations are unknown, so only tokens are counted.
        peak_tflops: Peak rate of a rank's GPU [TFLOP/s]. None: unknown, so there is no MFU.
        adapters: Weights of LoRA adapters that a token meets. None: all weights are trained.
        cp: Index of this rank's shard of each row, and number of shards.
    """

    def __init__(
        self,
        shape: ModelShape | None,
        world: World,
        *,
        peak_tflops: float | None = None,
        adapters: int | None = None,
        trains_vision: bool = False,
        trains_draft_layer: bool = False,
        cp: tuple[int, int] = (0, 1),
    ) -> None:
        self._shape, self._world, self._peak_tflops = shape, world, peak_tflops
        self._adapters, self._trains_vision, self._cp = adapters, trains_vision, cp
        self._trains_draft_layer = trains_draft_layer
        self._tokens, self._work = 0, Work()
        # Counted at the end of a step, because reading them makes the host wait for the GPU.
        self._grids: list[torch.Tensor] = []

    @classmethod
    def of(cls, policy: PolicyModel, config: Any, recipe: Recipe, world: World) -> FlopsMeter:
        """Return the meter of a recipe's policy, whose transformers config is `config`."""
        return cls(
            shape := _shape(config),
            world,
            peak_tflops=peak_tflops(recipe, world.device),
            adapters=adapter_weights(policy.model, shape) if policy.lora and shape else None,
            trains_vision=recipe.model.trains_encoder,
            trains_draft_layer=policy.draft_layer is not None,
            cp=(policy.cp_rank, policy.cp_world),
        )

    def add(self, rows: Sequence[Row], trained: int, images: VisionInput | None) -> None:
        """Count the operations of one micro batch.

        Args:
            rows: This rank's shards of rows.
            trained: Number of tokens whose logits this rank computes.
            images: Images of the whole rows.
        """
        positions = np.concatenate([_positions(row, *self._cp) for row in rows])
        self._tokens += positions.size
        if self._shape is None:
            return
        self._work += Work.of(positions, self._shape, trained)
        if images is not None:
            self._grids.append(images.grids)

    def take(self, seconds: float) -> dict[str, float]:
        """Return the metrics of the counted micro batches over all ranks, and begin again. A collective."""
        operations = 0.0
        is_known = self._shape is not None and (self._shape.vision is not None or not self._grids)
        if self._shape is not None:
            work = self._work + self._images()
            operations = flops(self._shape, work, adapters=self._adapters, trains_vision=self._trains_vision).step
            operations += draft_flops(self._shape, work).step if self._trains_draft_layer else 0.0
        sums = torch.tensor([self._tokens, operations], dtype=torch.float64, device=self._world.device)
        tokens, operations = self._world.sum(sums).tolist()
        self._tokens, self._work, self._grids = 0, Work(), []
        metrics = {"forwarded_tokens": tokens, "tokens_per_s_per_gpu": tokens / seconds / self._world.size}
        if is_known:
            rate = operations / seconds / self._world.size / 1e12
            metrics["tflops_per_gpu"] = rate
            if self._peak_tflops:
                metrics["mfu"] = rate / self._peak_tflops
        return metrics

    def _images(self) -> Work:
        """Return the work of encoding this rank's images. Ranks that share rows all encode the same images."""
        if not self._grids:
            return Work()
        patches = torch.cat(self._grids).prod(dim=1).double()
        shards = self._cp[1]
        return Work(patches=float(patches.sum()) / shards, patch_pairs=float((patches**2).sum()) / shards)


def peak_tflops(recipe: Recipe, device: torch.device) -> float | None:
    """Return the peak rate of a rank's GPU in the dtype of its products [TFLOP/s]; None if it is unknown."""
    if recipe.monitor.peak_tflops is not None:
        return recipe.monitor.peak_tflops
    if device.type != "cuda" or recipe.model.dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name()
    peak = peak_of(name)
    if peak is None:
        log.info("metrics have no MFU: the peak rate of %s is unknown; set monitor.peak_tflops", name)
        return None
    return peak.fp8 if recipe.trainer.fp8 else peak.bf16


def _shape(config: Any) -> ModelShape | None:
    try:
        return shape_of(config.to_dict())
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        log.info("metrics have no FLOP/s: the shape of the model is unknown: %r", error)
        return None


def adapter_weights(model: torch.nn.Module, shape: ModelShape) -> int:
    """Return the weights of LoRA adapters that a token meets. It meets those of the experts that it is routed to."""
    weights = 0
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            numel = parameter.numel()
            experts = shape.experts if "routed_experts" in name else None
            weights += numel * experts.top_k // experts.count if experts else numel
    return weights


def _positions(row: Row, rank: int, ranks: int) -> np.ndarray:
    """Return the positions of this rank's tokens within their documents, without the padding of the row."""
    size = len(row.positions) // ranks
    start, end = rank * size, (rank + 1) * size
    # Padding is the last document of a row, and has no trained token. Its token ids are 0.
    last = max(0, int(np.flatnonzero(row.positions == 0)[-1]) - start)
    if last < size and not row.token_ids[last:size].any() and not row.mask[last:size].any():
        end = start + last
    return row.positions[start:end]


class Peak(NamedTuple):
    """Peak rates of a GPU's matrix products [TFLOP/s]."""

    bf16: float
    fp8: float | None  # None if the GPU has no FP8 products


# By words of the device name. The entry with most words that fit is taken: "NVIDIA H100 PCIe" is not an SXM board.
_PEAKS: dict[tuple[str, ...], Peak] = {
    ("a100",): Peak(312, None),
    ("a800",): Peak(312, None),
    ("l4",): Peak(121, 242),
    ("l40",): Peak(181, 362),
    ("l40s",): Peak(362, 733),
    ("h20",): Peak(148, 296),
    ("h100",): Peak(989, 1979),
    ("h100", "pcie"): Peak(756, 1513),
    ("h100", "nvl"): Peak(835, 1671),
    ("h800",): Peak(989, 1979),
    ("h200",): Peak(989, 1979),
    ("h200", "nvl"): Peak(835, 1671),
    ("gh200",): Peak(989, 1979),
    ("b200",): Peak(2250, 4500),
    ("gb200",): Peak(2500, 5000),
    ("b300",): Peak(2250, 4500),
    ("gb300",): Peak(2500, 5000),
}


def peak_of(device: str) -> Peak | None:
    """Return the peak of a GPU, for example of "NVIDIA H200" or "h200"; None if it is unknown."""
    words = set(re.split(r"[\s\-_/]+", device.lower()))
    fitting = [name for name in _PEAKS if words.issuperset(name)]
    return _PEAKS[max(fitting, key=len)] if fitting else None
