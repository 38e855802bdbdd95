"""Predict the time of a trainer step from the shape and from rates measured on H100s and H200s. Pure.

A step is the sum of its parts, each of them operations or bytes divided by a rate. Constants marked "fitted" were
fitted together to the recorded steps on one and two GPUs, so that none of them means much alone.
`benchmarks/step_times.py` compares all recorded steps; docs/explanation/planning.md lists missing measurements.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from primeslurm.models.shape import ModelShape
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.estimates.trainer_memory import ELEMENT_BYTES, STATE_BYTES, experts_in_fp8
from primeslurm.plan.gpus import Gpu
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Parallelism

# Largest relative error of a predicted step on one node
SPREAD = 0.12
# Share of the peak that products with weights reach (set: the fit gives more than GPUs reach), and the relative time of
# products and elementwise work with LoRA adapters, which add small ones (fitted)
PRODUCTS, LORA = 0.9, 1.28
# Reads and writes per value, forward pass, and layer of what products leave to other operations: hidden states and
# queries, the inside of feed-forward networks, tokens on their way to experts. Fitted.
HIDDEN, INSIDE, ROUTED = 1.8, 39.3, 10.8
# The factor on the second for experts with biases, from gpt-oss-120b
BIASED = 1.75
# The share of the first two that compiled layers need. Fitted.
COMPILED = 0.54
# Bytes per second and GPU that NVLink carries, including copies before and after: tokens to experts by torch and by
# DeepEP, and rows to ranks that share them. Fitted.
DISPATCH = {"torch": 2.3e11, "deepep": 1.0e11}
EXCHANGE = 7.8e10
# Bytes read and written in a pass per gathered parameter (two gathers, one gradient) and per parameter that the GPU
# keeps (conversions, sums), counted. Fitted: those of quantisation per gathered parameter, and the share of the
# memory's bandwidth that all of them reach.
GATHERED_BYTES, KEPT_BYTES, QUANTISED_BYTES, WEIGHTS_SHARE = 24, 40, 42, 0.53
ATTENTION = 0.66
# Timed alone at 65,536 and 131,072 tokens (`sparse_attention_h200.json`)
SPARSE_FORWARD, SPARSE_BACKWARD = 0.5, 0.215
# Indexer scores and key selection. Ranks that share rows score equally many keys, so the mean holds for each of them.
SELECTION = 0.326
# Recurrences and their convolutions by kernels, which do few matrix products. Timed alone, not within steps
# (`recurrence_kernels_h200.json`).
DELTA, STATE_SPACE = 0.0106, 0.0068
# Operations per weight and token: two forward, four backward, and those of recomputation
OPERATIONS = {"none": 6, "selective": 7, "full": 8}
# Share of the line rate that collectives of large layers reach. Assumed.
NETWORK_SHARE = 0.8
# Bytes that an optimizer reads and writes per parameter in float32, beside its state
UPDATED_BYTES = 12
# Bytes read and written per parameter to add one gradient to another in float32
ADDED_BYTES = 12
# The 16 cores of one GPU of an H200 node under AdamW (measured); a node's host memory (assumed)
CORES_BYTES_S, HOST_BYTES_S = 3.65e10, 2e11


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    products: float  # products with weights
    elementwise: float  # everything between products
    attention: float
    selection: float  # key selection by the indexer of sparse attention
    recurrences: float  # Mamba-2 layers and delta nets
    dispatch: float  # tokens to experts on other GPUs and back
    exchange: float  # rows between ranks that share them
    weights: float  # copies, conversions and gradients of gathered weights, in every micro batch
    offload: float  # saved activations to host memory and back
    optimizer: float
    network: float  # all-gathers of weights and reductions of gradients between nodes

    @property
    def in_node(self) -> float:
        """Return the time without gathers and reductions between nodes."""
        return float(sum(asdict(self).values())) - self.network

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
        return {name: seconds for name, seconds in asdict(self).items() if name != "network" and seconds >= 0.05}


def step_time(
    recipe: Recipe, shape: ModelShape, gpu: Gpu, *, nodes: int, gpus: int, gbps: float, tokens: float, length: float
) -> StepTime:
    """Predict the time of a step.

    Args:
        gpus: GPUs per node.
        gbps: line rate between nodes per GPU [Gbit/s].
        tokens: tokens of a batch for the ranks that share rows. Of several such groups, the one with the most.
        length: tokens of a document. If they differ, the sum of their squares divided by their sum.
    """
    trainer, layout = recipe.trainer, recipe.trainer.parallelism
    full = layout.activation_checkpointing == "full"
    passes = math.ceil(tokens / (trainer.rows_at_once(recipe.seq_len) * recipe.seq_len))
    tokens /= layout.cp
    peak = gpu.bf16_tflops * 1e12
    operations = OPERATIONS[layout.activation_checkpointing]
    rate = PRODUCTS * (gpu.fp8_speedup if trainer.fp8 else 1) * peak
    slower = LORA if trainer.lora else 1
    p = count(shape)
    sent = (3 if full else 2) * 2 * tokens  # bytes, of two each, in the forward passes and the backward pass
    line = gbps * 1e9 / 8 * NETWORK_SHARE
    routed = 2 * shape.moe_layers * shape.experts.top_k * _inside(shape) if shape.experts else 0
    return StepTime(
        products=slower * (operations - (2 if trainer.lora else 0)) * p.active * tokens / rate,
        elementwise=slower * operations * _values(shape, bool(trainer.compile)) * tokens / (gpu.memory_tb_s * 1e12),
        attention=_attention(shape, length, full) * tokens / peak,
        selection=_selection(shape, length) * (1 if trainer.memory.keep_dsa_indices or not full else 2) * tokens / peak,
        recurrences=_recurrences(shape, full) * tokens / peak,
        dispatch=_sending(sent * routed, layout.ep, gpus, min(DISPATCH[layout.ep_backend], gpu.link_bytes_s), line),
        exchange=_sending(sent * _exchanged(shape, layout), layout.cp, gpus, min(EXCHANGE, gpu.link_bytes_s), line),
        weights=passes * _weight_bytes(recipe, shape, nodes * gpus) / (gpu.memory_tb_s * 1e12 * WEIGHTS_SHARE),
        offload=_offloaded(recipe, shape) * tokens / gpu.host_bytes_s,
        optimizer=_optimizer(recipe, nodes, gpus, shape, passes, gpu),
        network=_bytes_into_node(recipe, nodes, gpus, shape, passes) / (gpus * line),
    )


def _inside(shape: ModelShape) -> int:
    """Return the size of the vectors that experts take."""
    return (shape.experts.latent if shape.experts else None) or shape.hidden


def _values(shape: ModelShape, compiled: bool) -> float:
    """Return the values that operations other than products read and write for a token in a forward pass."""
    e, mla = shape.experts, shape.mla
    head = (mla.nope + mla.rope + mla.value) / 2 if mla else shape.head_dim
    widths = routed = 0.0
    if e:
        widths = shape.moe_layers * (e.shared_width + e.top_k * e.width * (BIASED if shape.expert_bias else 1))
        routed = shape.moe_layers * e.top_k * _inside(shape)
    widths = (widths + shape.dense_layers * shape.dense_width) * (1 if shape.gated else 2 / 3)
    hidden = shape.layers * shape.hidden + shape.attention_layers * shape.heads * head
    return (COMPILED if compiled else 1) * (HIDDEN * hidden + INSIDE * widths) + ROUTED * routed


def _sending(size: float, ranks: int, gpus: int, rate: float, line: float) -> float:
    """Predict the seconds that a GPU needs to send `size` bytes to `ranks` GPUs, itself included, in equal shares."""
    inside = min(ranks, gpus)
    return size / ranks * ((inside - 1) / rate + (ranks - inside) / line)


def _exchanged(shape: ModelShape, layout: Parallelism) -> float:
    """Return the values per token that ranks with shared rows send in a forward pass, their own share included."""
    mla, cp = shape.mla, layout.cp
    if mla and shape.indexer:  # each rank gathers compressed keys, and those of the indexer
        return cp * (shape.attention_layers * (mla.kv_rank + mla.rope) + shape.indexer.layers * shape.indexer.dim)
    query, value = (mla.nope + mla.rope, mla.value) if mla else (shape.head_dim, shape.head_dim)
    heads = shape.heads if mla else shape.kv_heads
    if layout.cp_style == "allgather":
        return cp * shape.attention_layers * heads * (query + value)
    return shape.attention_layers * (shape.heads + max(heads, cp)) * (query + value)


def _weight_bytes(recipe: Recipe, shape: ModelShape, gpus: int) -> float:
    """Return the bytes that a GPU reads and writes in a micro batch for its weights, without products."""
    layout, p = recipe.trainer.parallelism, count(shape)
    ranks = gpus // layout.dp_replicate
    experts, kept = p.experts / layout.ep, p.total / ranks
    gathered = p.total - p.experts + experts
    size = GATHERED_BYTES * gathered + KEPT_BYTES * kept
    if not recipe.trainer.fp8:
        return size
    # Experts that travel in FP8 are quantised by the GPUs that keep them.
    saved = experts - p.experts / ranks if experts_in_fp8(recipe, ranks, shape) else 0
    return size + QUANTISED_BYTES * (gathered - saved)


def _offloaded(recipe: Recipe, shape: ModelShape) -> int:
    """Return the bytes per token that go to host memory and back: with full checkpointing, the inputs of layers."""
    return 2 * 2 * shape.layers * shape.hidden if recipe.trainer.memory.activation_offload else 0


def _attention(shape: ModelShape, length: float, full: bool) -> float:
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


def _selection(shape: ModelShape, length: float) -> float:
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


def moving_state(size: float, gpus: int, link_bytes_s: float) -> float:
    """Predict the seconds to move optimizer state, `size` bytes per GPU, from a node's memory to its GPUs and back."""
    return max(size / link_bytes_s, 2 * gpus * size / HOST_BYTES_S)


def _optimizer(recipe: Recipe, nodes: int, gpus: int, shape: ModelShape, passes: int, gpu: Gpu) -> float:
    copies, state = recipe.trainer.parallelism.dp_replicate, STATE_BYTES[recipe.trainer.optimizer.type]
    parameters = 0.0 if recipe.trainer.lora else copies * count(shape).total / (nodes * gpus)
    size = parameters * (UPDATED_BYTES + 2 * state)
    if recipe.trainer.memory.optimizer_state_offload:
        return max(size / gpu.update_bytes_s, moving_state(parameters * state, gpus, gpu.host_bytes_s))
    if not recipe.trainer.memory.optimizer_offload:
        return size / gpu.update_bytes_s
    computed = max(size / CORES_BYTES_S, gpus * size / HOST_BYTES_S)
    return computed + _gradients_on_host(parameters, gpus, passes, gpu.host_bytes_s)


def _gradients_on_host(parameters: float, gpus: int, passes: int, link_bytes_s: float) -> float:
    """Predict the seconds to copy gradients to host memory and add them, while the GPUs wait."""
    # FSDP copies a gradient synchronously if it adds it to another one, so nothing overlaps (torch 2.13,
    # `foreach_reduce`).
    arriving = max(4 * parameters / link_bytes_s, 4 * gpus * parameters / HOST_BYTES_S)
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
