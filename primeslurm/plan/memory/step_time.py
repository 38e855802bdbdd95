"""What a step of the trainer takes, in parts: of the shape, by rates that were measured on H200s. Pure.

Rates are shares of the GPU's peak, executed operations with those of recomputation, of layers at full width on one or
two H200 of one host (`benchmarks/results/training_speed_h200.json`, `training_speed_h200x2.json`,
`sparse_attention_h200.json`). What happens between nodes
has not been measured: it is bytes by the line rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from primeslurm.models.shape import ModelShape
from primeslurm.plan.memory.gpus import Gpu
from primeslurm.plan.memory.parameters import count
from primeslurm.plan.memory.trainer import ELEMENT_BYTES, STATE_BYTES, experts_in_fp8
from primeslurm.recipe import Recipe

PRODUCTS = ((768, 0.21), (2048, 0.47))
"""Products with weights and all that one node does between them, by experts' width: Qwen3-30B-A3B; GLM-5, measured with
all experts on one GPU (0.50) and taken as slower by what travelling to those of another took before."""
IN_FP8 = ((768, 0.8), (2048, 1.35))
"""How much faster these are in FP8."""
COMPILED = ((768, 1.26), (2048, 1.0))
"""How much faster these are compiled."""
SPREAD = 0.08
"""How far a prediction was from a measured step of one node, at most, as a share of it."""
ATTENTION = 0.66
SPARSE_FORWARD, SPARSE_BACKWARD = 0.56, 0.235
SELECTION = 0.326
"""The indexer's scores and the choice of keys. Ranks that share rows score equally many: the mean is that of each."""
DELTA, STATE_SPACE = 0.0106, 0.0068
"""Recurrences and their convolutions by kernels, of which few are products of matrices: timed alone, not within steps
(`recurrence_kernels_h200.json`)."""
OPERATIONS = {"none": 6, "selective": 7, "full": 8}
"""Of products with weights, for each that a token meets: two forward, four backward, and those of recomputation."""
NETWORK_SHARE = 0.8
"""Of the line rate, for collectives of large layers. Assumed."""
OPTIMIZER_BYTES = 28
"""Read and written for a parameter by AdamW, in float32."""
ADDED_BYTES = 12
"""Read and written for a parameter where a gradient is added to another, in float32."""
GPU_BYTES_S, LINK_BYTES_S, HOST_BYTES_S = 4e12, 4.7e10, 2e11
"""An H200's memory under AdamW; its link to the host, both ways at once (both measured); a node's memory (assumed)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    products: float
    """Products with weights, elementwise work, tokens to experts and back within a node."""
    attention: float
    selection: float
    """Of keys, by the indexer of sparse attention."""
    recurrences: float
    """Of Mamba-2 layers and delta nets."""
    optimizer: float
    network: float
    """Weights that are gathered and gradients that are summed between nodes."""

    @property
    def in_node(self) -> float:
        """Without what is between nodes."""
        return self.products + self.attention + self.selection + self.recurrences + self.optimizer

    @property
    def shortest(self) -> float:
        """All between nodes is hidden behind the rest."""
        return max(self.in_node, self.network)

    @property
    def longest(self) -> float:
        """Nothing is."""
        return self.in_node + self.network

    @property
    def parts(self) -> dict[str, float]:
        """Those within a node that take any time."""
        found = {
            "products": self.products,
            "attention": self.attention,
            "selecting keys": self.selection,
            "recurrences, timed alone": self.recurrences,
            "optimizer": self.optimizer,
        }
        return {name: seconds for name, seconds in found.items() if seconds >= 0.05}


def step_time(
    recipe: Recipe, shape: ModelShape, gpu: Gpu, *, nodes: int, gpus: int, gbps: float, rows: int, length: int
) -> StepTime:
    """Predict a step.

    Args:
        recipe: of the run.
        shape: of the model.
        gpu: type of the trainer's GPUs.
        nodes: of the trainer.
        gpus: of each node.
        gbps: line rate between nodes, for each GPU, in Gbit/s.
        rows: sequences of a batch.
        length: tokens of each.
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
    """Weights that a token meets, those in compiled layers as what they are worth in others: recurrences are not."""
    parameters = count(shape)
    others = parameters.active - parameters.recurrent
    return parameters.recurrent + others / (_between(COMPILED, width) if compiled else 1.0)


def _between(points: tuple[tuple[float, float], tuple[float, float]], x: float) -> float:
    (low, first), (high, last) = points
    share = min(1.0, max(0.0, (x - low) / (high - low)))
    return first + share * (last - first)


def _attention(shape: ModelShape, length: int, full: bool) -> float:
    """Operations of attention for a token, each divided by the share of the peak that it reaches."""
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
    """As `_attention`: a state space learns and reads, the delta rule looks up what it knows before."""
    again, m, d = 4 if full else 3, shape.mamba, shape.delta_nets
    spaces = 2 * 2.0 * m.layers * m.heads * m.head_dim * m.state / STATE_SPACE if m else 0.0
    nets = 3 * 2.0 * d.layers * d.value_heads * d.value_dim * d.key_dim / DELTA if d else 0.0
    return again * (spaces + nets)


def moving_state(size: float, gpus: int) -> float:
    """Predict the seconds in which the GPUs of a node have brought optimizer state there and taken it back.

    Both ways at once over each GPU's link; host memory is read and written for all of them.

    Args:
        size: bytes of state of each GPU.
        gpus: of a node.
    """
    return max(size / LINK_BYTES_S, 2 * gpus * size / HOST_BYTES_S)


def _optimizer(recipe: Recipe, nodes: int, gpus: int, shape: ModelShape, passes: int) -> float:
    copies = recipe.trainer.parallelism.dp_replicate
    own = 0.0 if recipe.trainer.lora else copies * count(shape).total / (nodes * gpus)
    if recipe.trainer.memory.optimizer_state_offload:
        moved = own * STATE_BYTES[recipe.trainer.optimizer.type]
        return max(own * OPTIMIZER_BYTES / GPU_BYTES_S, moving_state(moved, gpus))
    if not recipe.trainer.memory.optimizer_offload:
        return own * OPTIMIZER_BYTES / GPU_BYTES_S
    return gpus * own * OPTIMIZER_BYTES / HOST_BYTES_S + _gradients_on_host(own, gpus, passes)


def _gradients_on_host(own: float, gpus: int, passes: int) -> float:
    """Predict the seconds in which gradients arrive in host memory and are added up, while their GPUs wait.

    FSDP copies what it adds to something synchronously: nothing is queued behind it (torch 2.13, `foreach_reduce`).
    """
    arriving = max(4 * own / LINK_BYTES_S, 4 * gpus * own / HOST_BYTES_S)
    return passes * arriving + (passes - 1) * gpus * own * ADDED_BYTES / HOST_BYTES_S


def _bytes_into_node(recipe: Recipe, nodes: int, gpus: int, shape: ModelShape, passes: int) -> float:
    """Bytes that a node receives in a step: for each of its GPUs' experts once, and once for what all of them share."""
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
