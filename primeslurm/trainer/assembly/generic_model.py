"""Train any causal language model with transformers' own code, sharded by FSDP. Masks are dense (quadratic memory)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchtitan.distributed.fsdp as titan_fsdp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from primeslurm.nn import one_rank
from primeslurm.nn.layers.vision import VisionInput
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Parallelism, Vlm
from primeslurm.trainer.components.logprobs import Scorable, logit_scores

_FULL, _SLIDING = "full_attention", "sliding_attention"


class GenericModel(Scorable, nn.Module):
    """A transformers model with the interface of `primeslurm.models`: packed rows, and masks made from positions.

    Without `vlm`, only text is trained. Raises ValueError if the model is not supported.
    """

    def __init__(self, hf: Any, vlm: Vlm | None = None) -> None:
        super().__init__()
        text = hf.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ())
        # transformers selects a mask by layer type if a config has layer types.
        self._windows = {_FULL: None, _SLIDING: text.sliding_window} if _SLIDING in kinds else {}
        self._window = None if kinds else getattr(text, "sliding_window", None)
        self.enable_weight_tying = hf.tie_word_embeddings
        vision = getattr(hf, "vision_config", None)
        for config in (hf, text, *([vision] if vision else ())):
            _disable_dropout(config)
        auto_class = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        self.inner = auto_class.from_config(hf, dtype=torch.float32, attn_implementation="sdpa")
        if kinds - {_FULL, _SLIDING} or getattr(self.inner, "_is_stateful", False):
            # Documents of a packed row would see the state of earlier documents.
            raise ValueError(f"{hf.model_type} has layers with state beside attention, which packed rows would mix")
        self.vision: PatchReader | None = None
        if vlm is not None and not vision:
            raise ValueError("model.vlm: the model has no vision encoder")
        if vision:
            parts = VisionParts.of(self.inner, vlm or Vlm())
            frozen = vlm is None or vlm.freeze_vision_encoder
            self.vision = PatchReader(parts, frozen) if vlm else None
            parts.freeze(encoder=frozen, others=vlm is None)

    @property
    def lm_head(self) -> GenericModel:
        """The module to call `scoring` on. It is the whole model, because some models change logits after the head."""
        return self

    def forward(
        self, tokens: torch.Tensor, *, positions: torch.Tensor, attention_masks: Any, images: VisionInput | None = None
    ) -> Any:
        """Return logits [rows, length, vocab]; within `scoring`, log-probabilities and entropies [trained tokens]."""
        inputs = {"input_ids": tokens, "position_ids": positions}
        if images is not None and self.vision is not None:
            inputs = self.vision.embedded(tokens, positions, images)
        logits = self.inner(**inputs, attention_mask=attention_masks, use_cache=False).logits
        if self._targets is None:
            return logits
        labels, temperatures, places = self._targets
        return logit_scores(logits.flatten(0, 1).index_select(0, places), labels, temperatures)

    def get_attention_masks(self, positions: torch.Tensor) -> Any:
        """Return which tokens see which, [rows, 1, length, length]; a dict by layer type if windows differ."""
        document = (positions == 0).cumsum(dim=1)
        index = torch.arange(positions.shape[1], device=positions.device)
        distance = index[:, None] - index
        visible = (document[:, :, None] == document[:, None, :]) & (distance >= 0)
        if self._windows:
            return {kind: _within(visible, distance, window) for kind, window in self._windows.items()}
        return _within(visible, distance, self._window)

    def init_weights(self) -> None:
        """Compute buffers that no checkpoint holds (rotary frequencies), and tie weights after a move to a device."""
        for parameter in self.inner.parameters():
            parameter._is_hf_initialized = True  # makes transformers skip it
        self.inner.init_weights()


def _disable_dropout(config: Any) -> None:
    # Engines have no dropout, so the trainer's log-probs would not match theirs.
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _within(visible: torch.Tensor, distance: torch.Tensor, window: int | None) -> torch.Tensor:
    return (visible & (distance < window) if window else visible)[:, None]


@dataclass(frozen=True)
class _CheckpointTensor:
    """A tensor of the checkpoint: some rows of one expert's matrix, or a whole tensor (`expert` is None)."""

    name: str
    expert: int | None = None
    start: int = 0
    rows: int = 0


class GenericAdapter:
    """Adapter between transformers' parameters, which stack experts, and its checkpoints, which may not.

    A rank converts the experts that it holds, without communication.
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
        if any(isinstance(tensor, DTensor) for tensor in state_dict.values()):
            self._last = state_dict
        return {
            part.name: tensor if part.expert is None else tensor[part.expert - first, part.start :][: part.rows]
            for name, whole in state_dict.items()
            for tensor, first in [_local(whole) if self._has_experts(name) else (whole, 0)]
            for part in self._parts.get(name, ())
            if part.expert is None or first <= part.expert < first + len(tensor)
        }

    def from_hf(self, hf_state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model tensors of the last `to_hf`. Loading has filled them, because both dicts share memory."""
        return self._last

    def _has_experts(self, name: str) -> bool:
        return any(part.expert is not None for part in self._parts.get(name, ()))


def _parts(inner: Any, name: str, tensor: torch.Tensor) -> list[_CheckpointTensor]:
    """Return the checkpoint tensors that a parameter consists of. Raises ValueError if it is not made of rows."""
    # transformers converts whole tensors only. Convert a tensor of row numbers to see where each row goes.
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
    """Return this rank's part of a tensor that is split by its first dimension, and the index of its first row."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    dimension = tensor.placements.index(Shard(0))
    return tensor.to_local(), mesh.get_local_rank(dimension) * -(-len(tensor) // mesh.size(dimension))


def build(
    hf: Any, dims: ParallelDims, recipe: Recipe, device: torch.device
) -> tuple[GenericModel, GenericAdapter, set[str]]:
    """Return the sharded model without weights, its adapter, and its checkpoint's tensor names. Raises ValueError."""
    layout, memory = recipe.trainer.parallelism, recipe.trainer.memory
    offload = memory.optimizer_offload or memory.activation_offload
    wide_head = recipe.model.head_dtype != "model"
    if layout.ep > 1 or layout.cp > 1 or memory.lm_head_chunk or offload or wide_head:
        missing = "EP, CP, logits in chunks or of another dtype, or offload"
        raise ValueError(f"{hf.model_type}: the transformers implementation has no {missing}")
    with torch.device("meta"):
        model = GenericModel(hf, recipe.model.vlm)
    adapter = GenericAdapter(model)
    hf_names = set(adapter.to_hf(model.state_dict()))
    if layout.activation_checkpointing != "none":
        model.inner.gradient_checkpointing_enable({"use_reentrant": False})
    _shard(model, dims, TORCH_DTYPE_MAP[recipe.model.dtype], layout)
    # Only parameters are loaded from the checkpoint, so `init_weights` has to compute the buffers.
    model.to_empty(device=device)
    model.init_weights()
    model.train()
    return model, adapter, hf_names


def _shard(model: GenericModel, dims: ParallelDims, dtype: torch.dtype, layout: Parallelism) -> None:
    mesh = dims.get_mesh(["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"])
    if one_rank.replaces_fsdp(model, mesh, dtype):
        one_rank.install(model, mesh, dtype)
        return
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=TORCH_DTYPE_MAP[layout.gradient_dtype],
        cast_forward_inputs=False,  # they are token ids and masks
    )
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=layout.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    titan_fsdp.disable_fsdp_gradient_division(model)  # the loss is already divided by the tokens of all ranks


ENCODERS = ("visual", "vision_tower", "vision_model", "vision_encoder")
# Usual attribute names, on the model or on its attribute `model`
LANGUAGE_MODELS = ("language_model", "text_model")


@dataclass(frozen=True)
class VisionParts:
    """The vision encoder and the language model within a transformers model."""

    inner: Any  # the whole model
    encoder: nn.Module
    language_model: nn.Module

    @classmethod
    def of(cls, inner: Any, settings: Vlm) -> VisionParts:
        """Find both by the attribute names in `model.vlm`, or by usual names. Raises ValueError if one is missing."""
        encoder = _part(inner, "vision_encoder", settings.vision_encoder, ENCODERS)
        language_model = _part(inner, "language_model", settings.language_model, LANGUAGE_MODELS)
        if {id(module) for module in encoder.modules()} & {id(module) for module in language_model.modules()}:
            raise ValueError(f"model.vlm: of {inner.config.model_type}, one of the two attributes is part of the other")
        return cls(inner, encoder, language_model)

    def freeze(self, encoder: bool, others: bool) -> None:
        """Freeze the encoder if `encoder`, and modules outside encoder and language model (a projector) if `others`."""
        head = self.inner.get_output_embeddings()
        parts = {id(p) for part in (self.encoder, self.language_model, head) for p in part.parameters()}
        for parameter in self.inner.parameters():
            if others and id(parameter) not in parts:
                parameter.requires_grad_(False)
        if encoder:
            self.encoder.requires_grad_(False)


class PatchReader:
    """Embeds images for models that read them as Qwen2-VL does: patches with a grid, and three coordinates per token.

    Raises ValueError for other models.
    """

    def __init__(self, parts: VisionParts, frozen: bool) -> None:
        hf = parts.inner.config
        sizes, rope = hf.vision_config, getattr(hf.get_text_config(), "rope_parameters", None) or {}
        names = ("spatial_merge_size", "temporal_patch_size", "patch_size", "in_channels")
        missing = [name for name in names if not isinstance(getattr(sizes, name, None), int)]
        if missing or "mrope_section" not in rope or getattr(sizes, "deepstack_visual_indexes", None):
            why = f"vision_config lacks {', '.join(missing)}" if missing else "its decoder takes them in another way"
            raise ValueError(
                f"model.vlm: {hf.model_type} does not read images as patches with three coordinates: {why}; "
                "leave model.vlm out to train on text"
            )
        self._parts, self._frozen = parts, frozen
        self.merge = int(sizes.spatial_merge_size)  # patches per token, in height and in width
        self.patch_values = int(sizes.in_channels * sizes.temporal_patch_size * sizes.patch_size**2)

    def embedded(self, tokens: torch.Tensor, positions: torch.Tensor, images: VisionInput) -> dict[str, torch.Tensor]:
        text = self._parts.inner.get_input_embeddings()(tokens)
        # A frozen encoder keeps no activations.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            output = self._parts.inner.get_image_features(
                pixel_values=images.pixels, image_grid_thw=images.grids, return_dict=True
            ).pooler_output
        features = output if isinstance(output, torch.Tensor) else torch.cat(tuple(output))
        # The position in the packed row comes first, then time, height and width.
        coordinates = torch.cat([positions[None], images.coordinates.permute(2, 0, 1)])
        return {"inputs_embeds": images.spread(features, text), "position_ids": coordinates}


def _part(inner: Any, field: str, name: str | None, usual: tuple[str, ...]) -> nn.Module:
    children = {path: module for path, module in _children(inner) if path}
    if name is not None and name in children:
        return children[name]
    paths = [path for path in children if name is None and path.rpartition(".")[2] in usual]
    if len(paths) == 1:
        return children[paths[0]]
    problem = f"no attribute {name!r}" if name is not None else f"{len(paths) or 'no'} attributes with a usual name"
    raise ValueError(f"model.vlm.{field}: {inner.config.model_type} has {problem}; it has {', '.join(children)}")


def _children(inner: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules of a model and of its attribute `model`, with their paths."""
    for name, module in inner.named_children():
        yield name, module
        if name == "model":
            yield from ((f"{name}.{below}", child) for below, child in module.named_children())
