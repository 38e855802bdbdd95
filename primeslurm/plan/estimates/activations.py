"""Activation memory of a model: what layers keep for the backward pass, and what recomputation needs.

Bytes per token are those of a token on this rank, after context parallelism has split the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from primeslurm.models.shape import DeltaNets, Mamba, ModelShape, Vision
from primeslurm.nn.block_sizes import DELTA_CHUNK, KERNEL_SEGMENT_TOKENS, SEGMENT_TOKENS

# Bytes per token of a segment and per element of all heads' queries, keys and values, in recurrence kernels. The larger
# of two values measured on an H200 (`benchmarks/results/recurrence_kernels_h200.json`; a Mamba-2 layer took 7.6).
KERNEL_BYTES = 9.2


@dataclass(frozen=True)
class Layers:
    """Layers of the same kind, and the bytes that one of them takes."""

    count: int
    none: int  # kept per token without activation checkpointing
    selective: int  # kept per token with selective checkpointing: the input, and about half of the rest
    full: int  # kept per token with full checkpointing: the input
    working: int  # per token, during recomputation and differentiation of the layer
    part: int = 0  # additional bytes for a layer that is recomputed in segments, if one rank has all heads
    chosen: int = 0  # per token, additional bytes for the keys that sparse attention selected: the mean of these layers

    def kept(self, checkpointing: str) -> int:
        return {"none": self.none, "selective": self.selective, "full": self.full}[checkpointing]


@dataclass(frozen=True)
class Mixer:
    """Bytes of activations of a recurrent layer, without norm and feed-forward network."""

    kept: int  # per token
    selective: int  # per token with selective checkpointing, which keeps every other matrix product
    part: int  # during recomputation of a segment
    kernel_part: int  # the same with the GPU kernels, which use longer segments


def layers_of(shape: ModelShape, dtype_bytes: int) -> list[Layers]:
    # A layer of a Mamba hybrid is either a mixer or a feed-forward network. Layers of other models have both.
    attention, network = _attention(shape), _feed_forward(shape)
    if shape.mamba:
        mixer = mamba(shape.mamba, shape.hidden, dtype_bytes)
        layers_by_kind = [
            _plain(shape.attention_layers, attention + 2 * shape.hidden, shape, dtype_bytes),
            _plain(shape.dense_layers + shape.moe_layers, network + 2 * shape.hidden, shape, dtype_bytes),
            _recurrent(shape.mamba.layers, mixer, 2 * shape.hidden, shape, dtype_bytes),
        ]
    else:
        inside = network + 4 * shape.hidden
        chosen = _selected(shape) // max(1, shape.attention_layers)
        layers_by_kind = [
            replace(_plain(shape.attention_layers, attention + inside, shape, dtype_bytes), chosen=chosen)
        ]
        if shape.delta_nets:
            mixer = delta_net(shape.delta_nets, shape.hidden, dtype_bytes)
            layers_by_kind.append(_recurrent(shape.delta_nets.layers, mixer, inside, shape, dtype_bytes))
    return [layers for layers in layers_by_kind if layers.count]


def delta_net(nets: DeltaNets, hidden: int, dtype_bytes: int) -> Mixer:
    # Kept: the input, its projections, the float32 output of the recurrence, the gated output, and for each segment the
    # initial state and the ends of convolutions. Within a segment, autograd saves for each head 15 float32 copies of
    # keys, 5.5 of values, 5 of the pairs of a chunk, and one state per chunk.
    keys, values = nets.key_heads * nets.key_dim, nets.value_heads * nets.value_dim
    channels, state = 2 * keys + values, 4 * nets.value_heads * nets.key_dim * nets.value_dim
    projected = channels + values + 2 * nets.value_heads
    begun = (state + (nets.conv - 1) * channels * dtype_bytes) // SEGMENT_TOKENS
    heads = nets.value_heads * (60 * nets.key_dim + 22 * nets.value_dim + 20 * DELTA_CHUNK)
    mixed = nets.value_heads * (2 * nets.key_dim + nets.value_dim)
    return Mixer(
        kept=(hidden + projected + values) * dtype_bytes + 4 * values + begun,
        selective=(hidden + channels + nets.value_heads) * dtype_bytes,
        part=SEGMENT_TOKENS * (_convolved(channels, nets.conv, dtype_bytes) + heads + state // DELTA_CHUNK),
        kernel_part=int(KERNEL_SEGMENT_TOKENS * KERNEL_BYTES * mixed),
    )


def mamba(layers: Mamba, hidden: int, dtype_bytes: int) -> Mixer:
    # Kept: as in a gated delta net. Within a segment, autograd saves for each head nine float32 copies of values, two
    # of the inputs and outputs of the state, two of the pairs of a chunk, and two states per chunk.
    values = layers.heads * layers.head_dim
    channels, state = values + 2 * layers.groups * layers.state, 4 * values * layers.state
    projected = values + channels + layers.heads
    begun = (state + (layers.conv - 1) * channels * dtype_bytes) // SEGMENT_TOKENS
    heads = 36 * values + 8 * layers.heads * (layers.state + layers.chunk) + 4 * layers.groups * layers.chunk
    return Mixer(
        kept=(hidden + projected + values) * dtype_bytes + 4 * values + begun,
        selective=(hidden + projected) * dtype_bytes,
        part=SEGMENT_TOKENS * (_convolved(channels, layers.conv, dtype_bytes) + heads + 2 * state // layers.chunk),
        kernel_part=int(KERNEL_SEGMENT_TOKENS * KERNEL_BYTES * (values + 2 * layers.heads * layers.state)),
    )


@dataclass(frozen=True)
class ImageBytes:
    """Bytes that a vision encoder takes per patch of an image."""

    pixels: int  # the patch, kept while its row is trained
    features: int  # encoder output for the language model
    ends: int  # kept for the backward pass by the embedding and the patch merger
    block: int  # kept by one block
    input: int  # kept by one block that is recomputed


def images_of(vision: Vision, dtype_bytes: int) -> ImageBytes:
    """Return the bytes of vision transformer blocks: eleven tensors of hidden width, two of feed-forward width."""
    hidden = vision.hidden * dtype_bytes
    features = vision.outputs * vision.out * dtype_bytes // vision.patches
    return ImageBytes(
        pixels=4 * vision.patch_values,
        features=features,
        ends=vision.patch_values * dtype_bytes + hidden + vision.outputs * 3 * hidden,
        block=11 * hidden + 2 * vision.width * dtype_bytes,
        input=hidden,
    )


def _plain(count: int, elements: int, shape: ModelShape, dtype_bytes: int) -> Layers:
    # During recomputation, tensors and their gradients exist together, hence twice.
    inside, given = elements * dtype_bytes, shape.hidden * dtype_bytes
    return Layers(count, inside, given + inside // 2, given, working=2 * inside)


def _recurrent(count: int, mixer: Mixer, elements: int, shape: ModelShape, dtype_bytes: int) -> Layers:
    """Return layers with a recurrence and `elements` per token outside of it."""
    # The backward pass has finished with those elements when it recomputes the recurrence.
    beside = elements * dtype_bytes
    return Layers(
        count,
        none=mixer.kept + beside,
        selective=mixer.selective + beside // 2,
        full=shape.hidden * dtype_bytes,
        working=2 * mixer.kept,
        part=max(mixer.part, mixer.kernel_part),
    )


def _convolved(channels: int, width: int, dtype_bytes: int) -> int:
    return channels * (width + 2) * dtype_bytes


def _attention(shape: ModelShape) -> int:
    """Return the elements per token that the projections of an attention layer compute."""
    if shape.mla:
        m = shape.mla
        return shape.heads * (2 * (m.nope + m.rope) + 2 * m.value) + m.q_rank + m.kv_rank
    return 2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim


def _selected(shape: ModelShape) -> int:
    """Return the bytes per token of selected keys (int32) in all layers."""
    # Layers without an indexer reuse the keys of an earlier layer.
    return 4 * shape.indexer.top_k * shape.indexer.layers if shape.indexer else 0


def _feed_forward(shape: ModelShape) -> int:
    """Return the elements per token that the largest feed-forward network computes."""
    dense = 3 * shape.dense_width if shape.dense_layers else 0
    if shape.experts is None:
        return dense
    e = shape.experts
    routed = e.top_k * (4 * (e.latent or shape.hidden) + 3 * e.width)  # in and out, in token and in expert order
    return max(dense, routed + 3 * e.shared_width)
