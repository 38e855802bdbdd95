"""Any causal language model of transformers, which may see images, by its own code there, sharded by FSDP alone.

Attention masks are dense, so memory grows with the square of the row: this is for models without a family of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torchtitan.distributed.fsdp as titan_fsdp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from primeslurm.nn.layers.vision import VisionInput
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Vlm
from primeslurm.trainer.assembly.generic_vision import PatchReader, VisionParts
from primeslurm.trainer.components.logprobs import logit_scores

_FULL, _SLIDING = "full_attention", "sliding_attention"


class GenericModel(nn.Module):
    """A model of transformers that is called as ours are: with packed rows and masks made of their positions.

    Args:
        hf: a config of transformers.
        vlm: how it sees images; None: it is trained on text alone, and what sees stays as it is.

    Raises:
        ValueError: transformers has no such causal model, or it carries state from token to token in another way
            than by attention, so that documents of a packed row would see one another; or it does not see images, or
            sees them in a way that is not known here.
    """

    def __init__(self, hf: Any, vlm: Vlm | None = None) -> None:
        super().__init__()
        text = hf.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ())
        self._windows = {_FULL: None, _SLIDING: text.sliding_window} if _SLIDING in kinds else {}
        self._window = None if kinds else getattr(text, "sliding_window", None)
        self._targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.enable_weight_tying = hf.tie_word_embeddings
        seeing = getattr(hf, "vision_config", None)
        for part in (hf, text, *([seeing] if seeing else ())):
            _drop_nothing(part)
        kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
        self.inner = kind.from_config(hf, dtype=torch.float32, attn_implementation="sdpa")
        if kinds - {_FULL, _SLIDING} or getattr(self.inner, "_is_stateful", False):
            raise ValueError(f"{hf.model_type} has layers that carry more than attention: packed rows would mix")
        self.vision: PatchReader | None = None
        if vlm is not None and not seeing:
            raise ValueError("model.vlm: the model has no vision encoder")
        if seeing:
            parts = VisionParts.of(self.inner, vlm or Vlm())
            frozen = vlm is None or vlm.freeze_vision_encoder
            self.vision = PatchReader(parts, frozen) if vlm else None
            parts.freeze(encoder=frozen, beside=vlm is None)

    @property
    def lm_head(self) -> GenericModel:
        """What is told what to score: the model, as some change the logits behind their head."""
        return self

    @contextmanager
    def scoring(self, labels: torch.Tensor, temperatures: torch.Tensor, places: torch.Tensor) -> Iterator[None]:
        """Within the body, calls return scores instead of logits, as `ScoringHead.scoring` has it.

        Args:
            labels: [trained tokens].
            temperatures: [trained tokens].
            places: [trained tokens], as in `token_logprobs`.
        """
        self._targets = labels, temperatures, places
        try:
            yield
        finally:
            self._targets = None

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        positions: torch.Tensor,
        attention_masks: Any,
        images: VisionInput | None = None,
    ) -> Any:
        """Logits [rows, length, vocab] of tokens [rows, length]; within `scoring`, scores [trained tokens]."""
        inputs = {"input_ids": tokens, "position_ids": positions}
        if images is not None and self.vision is not None:
            inputs = self.vision.embedded(tokens, positions, images)
        logits = self.inner(**inputs, attention_mask=attention_masks, use_cache=False).logits
        if self._targets is None:
            return logits
        labels, temperatures, places = self._targets
        return logit_scores(logits.flatten(0, 1).index_select(0, places), labels, temperatures)

    def get_attention_masks(self, positions: torch.Tensor) -> Any:
        """Which tokens see which, [rows, 1, length, length]; one for each kind of layer where windows differ."""
        document = (positions == 0).cumsum(dim=1)
        index = torch.arange(positions.shape[1], device=positions.device)
        distance = index[:, None] - index
        visible = (document[:, :, None] == document[:, None, :]) & (distance >= 0)
        if self._windows:
            return {kind: _within(visible, distance, window) for kind, window in self._windows.items()}
        return _within(visible, distance, self._window)

    def init_weights(self) -> None:
        """Compute what no checkpoint holds (rotary frequencies), and tie weights again after a move between devices."""
        for parameter in self.inner.parameters():
            parameter._is_hf_initialized = True  # by this, transformers leaves it alone
        self.inner.init_weights()


def _drop_nothing(config: Any) -> None:
    """Set dropout to zero: engines have none."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _within(visible: torch.Tensor, distance: torch.Tensor, window: int | None) -> torch.Tensor:
    return (visible & (distance < window) if window else visible)[:, None]


@dataclass(frozen=True)
class _CheckpointTensor:
    """A tensor of the checkpoint: rows of one matrix of a stack, or (expert None) a whole tensor."""

    name: str
    expert: int | None = None
    start: int = 0
    rows: int = 0


class GenericAdapter:
    """Between transformers' parameters and its checkpoints, where stacked experts are single tensors.

    Neither direction communicates: a rank converts the experts that it holds.
    """

    def __init__(self, model: GenericModel) -> None:
        tied = {f"inner.{name}" for name in model.inner.all_tied_weights_keys} if model.enable_weight_tying else set()
        self._parts = {
            name: _parts(model.inner, name.removeprefix("inner."), tensor)
            for name, tensor in model.state_dict().items()
            if name not in tied
        }
        self._last: dict[str, torch.Tensor] = {}

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Our tensors under checkpoint names; those of experts share their memory."""
        if any(isinstance(tensor, DTensor) for tensor in state_dict.values()):
            self._last = state_dict
        return {
            part.name: tensor if part.expert is None else tensor[part.expert - first, part.start :][: part.rows]
            for name, whole in state_dict.items()
            for tensor, first in [_local(whole) if self._is_stack(name) else (whole, 0)]
            for part in self._parts.get(name, ())
            if part.expert is None or first <= part.expert < first + len(tensor)
        }

    def from_hf(self, hf_state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sharded state dict that `to_hf` was last called with: what was read was read into its memory."""
        return self._last

    def get_hf_storage_reader(self, path: str) -> HuggingFaceStorageReader:
        """Reads the safetensors files of a directory."""
        return HuggingFaceStorageReader(path)

    def _is_stack(self, name: str) -> bool:
        return any(part.expert is not None for part in self._parts.get(name, ()))


def _parts(inner: Any, name: str, tensor: torch.Tensor) -> list[_CheckpointTensor]:
    """What a checkpoint holds of a parameter, found by converting numbered rows.

    Raises:
        ValueError: the checkpoint holds it neither whole nor in pieces of stacked matrices.
    """
    rows = tensor.shape[1] if tensor.dim() == 3 else 1
    count = math.prod(tensor.shape[:2]) if tensor.dim() == 3 else 1
    numbered = torch.arange(count, device="cpu").view(-1, rows, 1)
    pieces = revert_weight_conversion(inner, {name: numbered})
    if len(pieces) == 1 and next(iter(pieces.values())).shape == numbered.shape:
        return [_CheckpointTensor(next(iter(pieces)))]
    parts = []
    for theirs, piece in pieces.items():
        first, length = int(piece.flatten()[0]), piece.numel()
        if not torch.equal(piece.flatten(), torch.arange(first, first + length)) or first % rows + length > rows:
            raise ValueError(f"{inner.config.model_type}: {theirs} is not a piece of {name}")
        parts.append(_CheckpointTensor(theirs, first // rows, first % rows, length))
    return parts


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A rank's part of a tensor that is split by its first dimension, and where that part begins."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    dimension = tensor.placements.index(Shard(0))
    return tensor.to_local(), mesh.get_local_rank(dimension) * -(-len(tensor) // mesh.size(dimension))


def build(
    hf: Any, dims: ParallelDims, recipe: Recipe, device: torch.device
) -> tuple[GenericModel, GenericAdapter, set[str]]:
    """The sharded model, without its weights; its adapter; and all tensor names of its checkpoint.

    Raises:
        ValueError: the model or the parallelism does not fit.
    """
    layout, memory = recipe.trainer.parallelism, recipe.trainer.memory
    offload = memory.optimizer_offload or memory.activation_offload
    if layout.ep > 1 or layout.cp > 1 or memory.lm_head_chunk or offload:
        raise ValueError(f"{hf.model_type}: the transformers implementation has no EP, CP, logits in chunks or offload")
    with torch.device("meta"):
        model = GenericModel(hf, recipe.model.vlm)
    adapter = GenericAdapter(model)
    hf_names = set(adapter.to_hf(model.state_dict()))
    if layout.activation_checkpointing != "none":
        model.inner.gradient_checkpointing_enable({"use_reentrant": False})
    dtypes = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[recipe.model.dtype],
        reduce_dtype=TORCH_DTYPE_MAP[layout.gradient_dtype],
        cast_forward_inputs=False,
    )
    _shard(model, dims, dtypes, layout.reshard_after_forward)
    model.to_empty(device=device)
    model.init_weights()
    model.train()
    return model, adapter, hf_names


def _shard(model: GenericModel, dims: ParallelDims, policy: MixedPrecisionPolicy, reshard: bool) -> None:
    mesh = dims.get_mesh(["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"])
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    titan_fsdp.disable_fsdp_gradient_division(model)  # losses are divided by the tokens of all ranks
