"""Predict the time of a trainer step from the shape and from rates measured on H200s. Pure.

Rates are shares of the GPU's peak. They count executed operations, including recomputation, of layers at full width on
one or two H200 of one host (`benchmarks/results/training_speed_h200.json`, `training_speed_h200x2.json`,
`sparse_attention_h200.json`). Traffic between nodes has not been measured: it is bytes divided by the line rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from primeslurm.models.shape import ModelShape
from primeslurm.plan.gpus import Gpu
from primeslurm.plan.memory.parameters import count
from primeslurm.plan.memory.trainer import ELEMENT_BYTES, STATE_BYTES, experts_in_fp8
from primeslurm.recipe import Recipe

# Rate of matrix products with weights and everything between them on one node, by width of the experts: Qwen3-30B-A3B,
# and GLM-5. GLM-5 was measured with all experts on one GPU (0.50). The rate includes the loss that earlier measurements
# showed for dispatch to other GPUs.
PRODUCTS = ((768, 0.21), (2048, 0.47))
# Speed-up of these products in FP8
IN_FP8 = ((768, 0.8), (2048, 1.35))
# Speed-up of these products in compiled layers
COMPILED = ((768, 1.26), (2048, 1.0))
# Largest relative error of a predicted step on one node
SPREAD = 0.08
ATTENTION = 0.66
SPARSE_FORWARD, SPARSE_BACKWARD = 0.56, 0.235
# Indexer scores and key selection. Ranks that share rows score equally many keys, so the mean holds for each of them.
SELECTION = 0.326
# Recurrences and their convolutions by kernels, which do few matrix products. Timed alone, not within steps
# (`recurrence_kernels_h200.json`).
DELTA, STATE_SPACE = 0.0106, 0.0068
# Operations per weight and token: two forward, four backward, and those of recomputation
OPERATIONS = {"none": 6, "selective": 7, "full": 8}
# Share of the line rate that collectives of large layers reach. Assumed.
NETWORK_SHARE = 0.8
# Bytes that AdamW reads and writes per parameter in float32
OPTIMIZER_BYTES = 28
# Bytes read and written per parameter to add one gradient to another in float32
ADDED_BYTES = 12
# An H200's memory under AdamW, its link to the host with traffic both ways (both measured), and a node's host memory
# (assumed)
GPU_BYTES_S, LINK_BYTES_S, HOST_BYTES_S = 4e12, 4.7e10, 2e11


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    products: float  # products with weights, elementwise work, and expert dispatch within a node
    attention: float
    selection: float  # key selection by the indexer of sparse attention
    recurrences: float  # Mamba-2 layers and delta nets
    optimizer: float
    network: float  # all-gathers of weights and reductions of gradients between nodes

    @property
    def in_node(self) -> float:
        """Return the time without traffic between nodes."""
        return self.products + self.attention + self.selection + self.recurrences + self.optimizer

    @property
    def shortest(self) -> float:
        """Return the time if traffic between nodes overlaps completely."""
        return max(self.in_node, self.network)

    @property
    def longest(self) -> float:
        """Return the time if traffic between nodes does not overlap."""
        return self.in_node + self.network

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts within a node that take measurable time."""
        seconds_by_part = {
            "products": self.products,
            "attention": self.attention,
            "selecting keys": self.selection,
            "recurrences, timed alone": self.recurrences,
            "optimizer": self.optimizer,
        }
        return {name: seconds for name, seconds in seconds_by_part.items() if seconds >= 0.05}


def step_time(
    recipe: Recipe, shape: ModelShape, gpu: Gpu, *, nodes: int, gpus: int, gbps: float, rows: int, length: int
) -> StepTime:
    """Predict the time of a step.

    Args:
        nodes: number of trainer nodes.
        gpus: GPUs per node.
        gbps: line rate between nodes per GPU [Gbit/s].
        rows: sequences per batch.
        length: tokens per sequence.
    """
    trainer = recipe.trainer
    full = trainer.parallelism.activation_checkpointing == "full"
    tokens = rows * length / (nodes * gpus)
    peak = gpu.bf16_tflops * 1e12
    width = shape.experts.width if shape.experts else PRODUCTS[-1][0]
    rate = _between(PRODUCTS, width) * (_between(IN_FP8, width) if trainer.fp8 else 1.0)
    operations = OPERATIONS[trainer.parallelism.activation_checkpointing] - (2 if trainer.lora else 0)
    passes = math.ceil(tokens / trainer.micro_batch_tokens)
    return StepTime(
        products=operations * _multiplied(shape, width, bool(trainer.compile)) * tokens / (rate * peak),
        attention=_attention(shape, length, full) * tokens / peak,
        selection=_selection(shape, length) * (1 if trainer.memory.keep_dsa_indices or not full else 2) * tokens / peak,
        recurrences=_recurrences(shape, full) * tokens / peak,
        optimizer=_optimizer(recipe, nodes, gpus, shape, passes),
        network=_bytes_into_node(recipe, nodes, gpus, shape, passes) / (gpus * gbps * 1e9 / 8 * NETWORK_SHARE),
    )


def _multiplied(shape: ModelShape, width: int, compiled: bool) -> float:
    """Return the weights that a token meets, scaled by the speed-up of compiled layers. Recurrences have none."""
    parameters = count(shape)
    others = parameters.active - parameters.recurrent
    return parameters.recurrent + others / (_between(COMPILED, width) if compiled else 1.0)


def _between(points: tuple[tuple[float, float], tuple[float, float]], x: float) -> float:
    (low, first), (high, last) = points
    share = min(1.0, max(0.0, (x - low) / (high - low)))
    return first + share * (last - first)


def _attention(shape: ModelShape, length: int, full: bool) -> float:
    """Return the attention operations per token, divided by the share of the peak that they reach."""
    again = 2 if full else 1
    if shape.indexer and shape.mla:  # absorbed: keys are compressed keys and rotary parts, values the compressed keys
        pairs = 2.0 * shape.attention_layers * shape.heads * min(shape.indexer.top_k, length)
        once = pairs * (2 * shape.mla.kv_rank + shape.mla.rope)  # scores, outputs
        backward = pairs * (5 * shape.mla.kv_rank + 3 * shape.mla.rope)  # both again, and three gradients
        return again * once / SPARSE_FORWARD + backward / SPARSE_BACKWARD
    mla = shape.mla
    head = (mla.nope + mla.rope + mla.value) / 2 if mla else shape.head_dim
    once = 2.0 * shape.heads * head * length  # two products with half of the keys on average
    return (shape.attention_layers - shape.window_layers) * once * (again + 2.5) / ATTENTION


def _selection(shape: ModelShape, length: int) -> float:
    if shape.indexer is None:
        return 0.0
    return shape.indexer.layers * 2.0 * shape.indexer.heads * shape.indexer.dim * length / 2 / SELECTION


def _recurrences(shape: ModelShape, full: bool) -> float:
    """Return the operations of recurrences per token, as `_attention` does."""
    # A state space writes and reads its state. The delta rule also reads it before it writes.
    again, m, d = 4 if full else 3, shape.mamba, shape.delta_nets
    spaces = 2 * 2.0 * m.layers * m.heads * m.head_dim * m.state / STATE_SPACE if m else 0.0
    nets = 3 * 2.0 * d.layers * d.value_heads * d.value_dim * d.key_dim / DELTA if d else 0.0
    return again * (spaces + nets)


def moving_state(size: float, gpus: int) -> float:
    """Predict the seconds to move optimizer state from host memory to the GPUs of a node and back.

    Args:
        size: bytes of state per GPU.
        gpus: GPUs of the node.
    """
    return max(size / LINK_BYTES_S, 2 * gpus * size / HOST_BYTES_S)


def _optimizer(recipe: Recipe, nodes: int, gpus: int, shape: ModelShape, passes: int) -> float:
    copies = recipe.trainer.parallelism.dp_replicate
    parameters = 0.0 if recipe.trainer.lora else copies * count(shape).total / (nodes * gpus)
    if recipe.trainer.memory.optimizer_state_offload:
        moved = parameters * STATE_BYTES[recipe.trainer.optimizer.type]
        return max(parameters * OPTIMIZER_BYTES / GPU_BYTES_S, moving_state(moved, gpus))
    if not recipe.trainer.memory.optimizer_offload:
        return parameters * OPTIMIZER_BYTES / GPU_BYTES_S
    return gpus * parameters * OPTIMIZER_BYTES / HOST_BYTES_S + _gradients_on_host(parameters, gpus, passes)


def _gradients_on_host(parameters: float, gpus: int, passes: int) -> float:
    """Predict the seconds to copy gradients to host memory and add them, while the GPUs wait."""
    # FSDP copies a gradient synchronously if it adds it to another one, so nothing overlaps (torch 2.13,
    # `foreach_reduce`).
    arriving = max(4 * parameters / LINK_BYTES_S, 4 * gpus * parameters / HOST_BYTES_S)
    return passes * arriving + (passes - 1) * gpus * parameters * ADDED_BYTES / HOST_BYTES_S


def _bytes_into_node(recipe: Recipe, nodes: int, gpus: int, shape: ModelShape, passes: int) -> float:
    """Return the bytes that a node receives in a step: the experts of each GPU, and one copy of everything else."""
    parallel = recipe.trainer.parallelism
    shards = max(1, nodes // parallel.dp_replicate)
    p = count(shape)
    experts = p.experts * min(1.0, gpus / parallel.ep)
    held = p.total - p.experts + experts
    gathers = 2 * passes if parallel.reshard_after_forward else 1
    sums = 0 if recipe.trainer.lora else 1 if parallel.reduce_gradients == "step" else passes
    element, gradient = ELEMENT_BYTES[recipe.model.dtype], ELEMENT_BYTES[parallel.gradient_dtype]
    weights = held * element
    if experts_in_fp8(recipe, nodes * gpus // parallel.dp_replicate, shape):
        weights -= experts * (element - 1)
    within = (1 - 1 / shards) * (gathers * weights + sums * held * gradient)
    copies = nodes // shards
    return within + sums * 2 * (1 - 1 / copies) * gradient * held / shards
