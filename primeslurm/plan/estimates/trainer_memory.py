"""Memory of one trainer GPU under FSDP x EP x CP, host memory per GPU, and the size of checkpoints."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath

from primeslurm.models import EXPERTS, SWIGLU
from primeslurm.models.expert_sharding import shards_have_whole_blocks
from primeslurm.models.shape import ModelShape
from primeslurm.nn.block_sizes import FP8_BLOCK
from primeslurm.plan.estimates.activations import images_of, layers_of
from primeslurm.plan.estimates.parameters import count, largest_layer, largest_tensor
from primeslurm.plan.forecast import Quantity
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import CONTEXT_BYTES, STATE_BUFFERS, STATE_CHUNK_BYTES

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
# Bytes of optimizer state per parameter. (Muon uses AdamW for embedding and head: a few per cent of a large model.)
STATE_BYTES = {"adamw": 8, "muon": 4, "sgd": 4, "sign_sgd": 0}
# Bytes per logit at the peak of the loss: bfloat16 output, float32 copy, log-softmax and gradient, bfloat16 gradient
LOGIT_BYTES = 16
# Bytes per logit that the policy keeps for its backward pass while the draft layer computes its own loss
KEPT_LOGIT_BYTES = 4
# Name of the quantity with the size of checkpoint copies on a train node
LOCAL_COPIES = "local copies"
_MEMORY = PurePosixPath("/dev/shm")


@dataclass(frozen=True)
class TrainerLayout:
    """Settings of the trainer that determine its memory."""

    shard: int  # GPUs that share a copy of the model
    ep: int
    tokens: int  # tokens of a micro batch on one GPU, after context parallelism has split them
    checkpointing: str  # none, selective or full
    optimizer_offload: bool = False
    activation_offload: bool = False
    logit_tokens: int | None = None  # Tokens whose logits exist at once. None: all.
    lora_parameters: int = 0  # Trained parameters. 0: all of the model.
    whole_adapters: bool = False  # whether one rank has all adapters, instead of a shard on each
    dtype_bytes: int = 2  # bytes per element of compute
    state_bytes: int = 8  # bytes of optimizer state per trained parameter: two float32 moments with AdamW
    reshard: bool = True  # whether gathered layers are freed after their forward pass
    reduced_once: bool = False  # whether gradients stay unsharded until the last micro batch of a step
    staged: bool = False  # whether checkpoints are written from a copy in host memory
    cp: int = 1  # Ranks that share each row. They do not share images: each encodes those of all its tokens.
    images: bool = False  # whether rows have images
    frozen_vision: bool = True  # whether the vision encoder is frozen
    state_offload: bool = False  # whether only the optimizer state is in host memory
    gradient_bytes: int = 4  # bytes per element of gradients during reduction
    keeps_selection: bool = True  # whether full checkpointing keeps the selected keys
    experts_in_fp8: bool = False  # whether experts are gathered in FP8
    draft_layer: bool = False  # whether a draft layer is trained; the shape includes it


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one trainer GPU, and in host memory per GPU."""

    weights: int  # the rank's shard of the float32 masters
    gradients: int
    optimizer: int
    """Optimizer state. If it is in host memory: what its buffers need beyond memory that is free during the optimizer
    step."""
    gathered: int  # the current and the prefetched layer, unsharded, with gradients before reduction
    activations: int
    images: int  # activations of the vision encoder, if every token belongs to an image
    logits: int
    host: int

    @property
    def allocated(self) -> int:
        states = self.weights + self.gradients + self.optimizer
        return states + self.gathered + self.activations + self.images + self.logits

    @property
    def total(self) -> int:
        return self.allocated + CONTEXT_BYTES


def trainer_memory(shape: ModelShape, layout: TrainerLayout) -> TrainerMemory:
    """Return the peak of one trainer GPU.

    Float32 masters, gradients and two AdamW moments are 16 bytes per parameter over the shard (Rajbhandari et al.,
    ZeRO, arXiv 1910.02054, stage 3). Optimizer offload moves all three to host memory, offload of the state only that.
    With LoRA the model is frozen: masters only.
    """
    total, trained = count(shape).total, trained_parameters(shape, layout.lora_parameters, layout.frozen_vision)
    masters, gradients, state = 4 * total, 4 * trained, layout.state_bytes * trained
    on_host = masters + gradients + state if layout.optimizer_offload else state if layout.state_offload else 0
    on_gpu = 0 if layout.optimizer_offload else 1
    copies = masters + state if layout.staged else 0
    activations = activation_bytes(shape, layout)
    per_logit = LOGIT_BYTES + (KEPT_LOGIT_BYTES if layout.draft_layer else 0)
    logits = min(layout.tokens, layout.logit_tokens or layout.tokens) * shape.vocab * per_logit
    gathered = _gathered(shape, layout)
    owners = 1 if layout.whole_adapters else layout.shard
    own_state = on_gpu * state // owners
    if layout.state_offload:
        own_state = max(0, _state_buffers(shape, layout, trained) - gathered - activations - logits)
    return TrainerMemory(
        weights=on_gpu * masters // layout.shard,
        gradients=on_gpu * gradients // owners + _unreduced(shape, layout, trained),
        optimizer=own_state,
        gathered=gathered,
        activations=activations,
        images=image_bytes(shape, layout, beside=activations + logits),
        logits=logits,
        host=(on_host + copies) // layout.shard + _waiting(shape, layout),
    )


def trained_parameters(shape: ModelShape, adapters: int, frozen_vision: bool) -> int:
    """Return the number of parameters with gradients: adapters if there are any, else everything that is not frozen."""
    parameters = count(shape)
    return adapters or (parameters.language if frozen_vision else parameters.total)


def layer_gather_bytes(shape: ModelShape, ep: int, bytes_per_parameter: int, expert_bytes: int | None = None) -> int:
    """Return the bytes of one unsharded layer on a GPU. Experts stay spread over the `ep` expert-parallel ranks."""
    experts, rest = largest_layer(shape)
    each = bytes_per_parameter if expert_bytes is None else expert_bytes
    return experts // ep * each + rest * bytes_per_parameter


def experts_in_fp8(recipe: Recipe, ranks: int, shape: ModelShape) -> bool:
    """Return whether FSDP gathers experts in FP8 on `ranks` GPUs that share a copy of the model."""
    trainer = recipe.trainer
    requested = trainer.fp8 and trainer.grouped_mm and not trainer.memory.optimizer_offload
    return requested and shards_have_whole_blocks(shape, ranks, trainer.parallelism.ep, FP8_BLOCK)


def lora_parameters(shape: ModelShape, rank: int, targets: Collection[str] | None = None) -> int:
    """Count the parameters of adapters on linear layers: rank x (inputs + outputs).

    `targets` as in `trainer.lora`. All layers count if it is None, or names layers of another attention than GQA.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outer = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q}
    every = {*outer, *SWIGLU, *EXPERTS}
    wanted = every if targets is None or not every.issuperset(targets) else set(targets)
    matrices = len(SWIGLU & wanted)
    total = shape.attention_layers * sum(shape.hidden + size for name, size in outer.items() if name in wanted)
    total += shape.dense_layers * matrices * (shape.hidden + shape.dense_width)
    if shape.experts:
        e = shape.experts
        each = 3 * ((e.latent or shape.hidden) + e.width) if EXPERTS & wanted else 0
        shared = matrices * (shape.hidden + e.shared_width) if e.shared_width else 0
        total += shape.moe_layers * (e.count * each + shared)
    return rank * total


def _unreduced(shape: ModelShape, layout: TrainerLayout, trained: int) -> int:
    if not layout.reduced_once:
        return 0
    experts = 0 if layout.lora_parameters else count(shape).experts
    return layout.gradient_bytes * (experts // layout.ep + trained - experts)


def _state_buffers(shape: ModelShape, layout: TrainerLayout, trained: int) -> int:
    """Return the bytes of buffers between host and GPU for pieces of optimizer state, or for the largest tensor's."""
    largest = 0 if layout.lora_parameters else largest_tensor(shape) // layout.shard
    piece = layout.state_bytes * max(STATE_CHUNK_BYTES // 4, largest)
    return min(STATE_BUFFERS * piece, layout.state_bytes * trained // layout.shard)


def _gathered(shape: ModelShape, layout: TrainerLayout) -> int:
    # Two layers in the compute dtype, or all of them, and the gradients of one with a copy for the reduction. Blocks of
    # a vision encoder are gathered while no layer is, so only an encoder that stays gathered counts.
    frozen = bool(layout.lora_parameters)
    gradients = 0 if frozen else layout.dtype_bytes + layout.gradient_bytes
    copies = 2 if layout.reshard else shape.layers
    expert_bytes = 1 if layout.experts_in_fp8 else layout.dtype_bytes
    per_parameter = copies * layout.dtype_bytes + gradients
    layers = layer_gather_bytes(shape, layout.ep, per_parameter, copies * expert_bytes + gradients)
    ends = shape.vocab * shape.hidden * (layout.dtype_bytes + gradients)
    encoder = 0 if layout.reshard or not layout.images else count(shape).vision * layout.dtype_bytes
    return layers + ends + encoder


def activation_bytes(shape: ModelShape, layout: TrainerLayout) -> int:
    """Return the bytes that the forward pass keeps, and those of the layer that is recomputed."""
    # With offload, two layers are on the GPU, and the selected keys of all layers. Ranks that share rows also share the
    # heads of recurrent layers.
    kinds = layers_of(shape, layout.dtype_bytes)
    kept = sum(layers.count * layers.kept(layout.checkpointing) for layers in kinds)
    if layout.activation_offload:
        kept = 2 * max(layers.kept(layout.checkpointing) for layers in kinds)
    if layout.keeps_selection or layout.checkpointing != "full":
        kept += sum(layers.count * layers.chosen for layers in kinds)
    return layout.tokens * kept + max(layout.tokens * layers.working + layers.part // layout.cp for layers in kinds)


def image_bytes(shape: ModelShape, layout: TrainerLayout, beside: int) -> int:
    """Return the bytes of images in addition to their tokens, if every token belongs to an image."""
    # The encoder runs before and after all layers of the language model, when their memory (`beside`) is free. Only
    # what exceeds it counts. A frozen encoder keeps only its results.
    if shape.vision is None or not layout.images:
        return 0
    each = images_of(shape.vision, layout.dtype_bytes)
    patches = layout.tokens * layout.cp * shape.vision.patches
    kept = each.pixels + each.features
    if not layout.frozen_vision:
        blocks = each.block if layout.checkpointing == "none" else each.input
        kept += each.ends + shape.vision.depth * blocks
    return patches * kept + max(0, patches * each.block - beside)


def _waiting(shape: ModelShape, layout: TrainerLayout) -> int:
    if not layout.activation_offload:
        return 0
    kinds = layers_of(shape, layout.dtype_bytes)
    return layout.tokens * sum(layers.count * layers.kept(layout.checkpointing) for layers in kinds)


def checkpoint_bytes(recipe: Recipe, trained: int, state_bytes: int) -> int:
    """Return the bytes of float32 masters and optimizer state, `state_bytes` per trained parameter."""
    return (4 + state_bytes // (2 if recipe.checkpoint.moments == "bfloat16" else 1)) * trained


def local_bytes(recipe: Recipe, saved: int, nodes: int) -> int:
    """Return the bytes of copies on a train node: files of its own ranks, and of another node if there is one."""
    if recipe.checkpoint.local is None:
        return 0
    return saved // nodes * (2 if nodes > 1 else 1)


def in_memory(recipe: Recipe) -> bool:
    return recipe.checkpoint.local is not None and PurePosixPath(recipe.checkpoint.local).is_relative_to(_MEMORY)


def local_amounts(recipe: Recipe, saved: int, nodes: int) -> list[Quantity]:
    size = local_bytes(recipe, saved, nodes)
    if not size:
        return []
    how = f"files of its own ranks{' and of another node' if nodes > 1 else ''} in {recipe.checkpoint.local}"
    return [Quantity(name=LOCAL_COPIES, value=round(size / 1e9, 1), unit="GB per train node", how=how)]
