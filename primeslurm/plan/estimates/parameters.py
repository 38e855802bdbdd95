"""Parameter counts of a model, split as sharding needs them: experts, other layers, embedding and output."""

from __future__ import annotations

from dataclasses import dataclass

from primeslurm.models.shape import DeltaNets, Mamba, Mla, ModelShape, Vision


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    embedding: int
    head: int  # Output projection. 0 if it is tied to the embedding.
    attention: int  # attention, Mamba and delta nets of all layers
    recurrent: int  # Mamba and delta nets, which `attention` includes
    dense: int  # dense feed-forward networks and shared experts of all layers
    routers: int
    experts: int  # routed experts of all layers
    norms: int
    active_experts: int  # routed experts that one token passes
    vision: int  # vision encoder

    @property
    def language(self) -> int:
        """Return all parameters except the vision encoder."""
        return self.embedding + self.head + self.attention + self.dense + self.routers + self.experts + self.norms

    @property
    def total(self) -> int:
        return self.language + self.vision

    @property
    def active(self) -> int:
        """Return the parameters in the matrix products of a text token."""
        # The embedding is a look-up, unless it is tied to the output.
        return self.language - self.experts + self.active_experts - (self.embedding if self.head else 0)

    @property
    def layers(self) -> int:
        """Return the parameters of the language model without embedding and output."""
        return self.language - self.embedding - self.head


def count(shape: ModelShape) -> Parameters:
    ends = shape.vocab * shape.hidden
    matrices = 3 if shape.gated else 2
    experts = active = shared = routers = 0
    if shape.experts:
        e = shape.experts
        inside = e.latent or shape.hidden
        one = matrices * inside * e.width + (2 * e.width + inside if shape.expert_bias else 0)
        experts, active = (shape.moe_layers * n * one for n in (e.count, e.top_k))
        shared = shape.moe_layers * matrices * shape.hidden * e.shared_width
        shared += shape.moe_layers * 2 * shape.hidden * e.latent if e.latent else 0
        routers = shape.moe_layers * shape.hidden * e.count
    mamba = shape.mamba.layers * _mamba(shape.mamba, shape.hidden) if shape.mamba else 0
    nets = shape.delta_nets.layers * _delta_net(shape.delta_nets, shape.hidden) if shape.delta_nets else 0
    return Parameters(
        embedding=ends,
        head=0 if shape.tied else ends,
        attention=shape.attention_layers * _attention(shape) + mamba + nets,
        recurrent=mamba + nets,
        dense=shape.dense_layers * matrices * shape.hidden * shape.dense_width + shared,
        routers=routers,
        experts=experts,
        norms=_norms(shape),
        active_experts=active,
        vision=_vision(shape.vision) if shape.vision else 0,
    )


def largest_layer(shape: ModelShape) -> tuple[int, int]:
    """Return the parameters of the largest layer: routed experts, everything else."""
    if shape.experts is None:
        rest = _attention(shape) + (3 if shape.gated else 2) * shape.hidden * shape.dense_width
        return 0, rest
    parameters = count(shape)
    shared = (3 if shape.gated else 2) * shape.hidden * shape.experts.shared_width
    attention = 0 if shape.mamba else _attention(shape)
    return parameters.experts // shape.moe_layers, attention + shared + shape.hidden * shape.experts.count


def largest_tensor(shape: ModelShape) -> int:
    """Return the parameters of the largest tensor: embedding, one matrix of all experts, or of a dense layer."""
    experts = 0
    if shape.experts:
        experts = shape.experts.count * (shape.experts.latent or shape.hidden) * shape.experts.width
    return max(shape.vocab * shape.hidden, experts, shape.hidden * shape.dense_width)


def _attention(shape: ModelShape) -> int:
    if shape.mla:
        return _latent_attention(shape, shape.mla)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    bias = q + 2 * kv + (shape.hidden if shape.output_bias else 0) if shape.attention_bias else 0
    sinks = shape.heads if shape.sinks else 0
    return shape.hidden * (2 * q + 2 * kv + shape.attention_gate) + bias + sinks


def _latent_attention(shape: ModelShape, mla: Mla) -> int:
    query = shape.heads * (mla.nope + mla.rope)
    down = shape.hidden * (mla.q_rank + mla.kv_rank + mla.rope)
    up = (mla.q_rank or shape.hidden) * query + mla.kv_rank * shape.heads * (mla.nope + mla.value)
    indexer = 0
    if shape.indexer:
        i = shape.indexer
        indexer = mla.q_rank * i.heads * i.dim + shape.hidden * (i.dim + i.heads)
    return down + up + shape.heads * mla.value * shape.hidden + indexer


def _mamba(mamba: Mamba, hidden: int) -> int:
    inner, mixed = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    return hidden * (2 * inner + mixed + mamba.heads) + inner * hidden + (inner + mixed) * (mamba.conv + 1)


def _delta_net(nets: DeltaNets, hidden: int) -> int:
    keys, values = nets.key_heads * nets.key_dim, nets.value_heads * nets.value_dim
    return hidden * (2 * keys + 3 * values + 2 * nets.value_heads) + (2 * keys + values) * nets.conv


def _norms(shape: ModelShape) -> int:
    per_layer = 1 if shape.mamba else 4 if shape.post_norms else 2
    heads = 2 * shape.head_dim if shape.qk_norm else 0
    ranks = shape.mla.q_rank + shape.mla.kv_rank if shape.mla else 0
    return shape.hidden * (per_layer * shape.layers + 1) + shape.attention_layers * (heads + ranks)


def _vision(vision: Vision) -> int:
    """Count the parameters of a vision encoder whose linear layers and norms have biases."""
    # A merger network per output joins patches to a token. Its width is that of all joined patches.
    hidden, width, merged = vision.hidden, vision.width, vision.hidden * vision.patches
    block = 4 * hidden * (hidden + 1) + 2 * hidden * width + width + hidden + 4 * hidden
    embedding = hidden * (vision.patch_values + 1) + hidden * vision.positions
    merger = merged * (merged + 1) + (merged + 1) * vision.out
    norms = 2 * hidden + (vision.outputs - 1) * 2 * merged
    return vision.depth * block + embedding + vision.outputs * merger + norms
