"""How many parameters a model has, split as sharding needs it: experts, the rest of a layer, and the two ends."""

from __future__ import annotations

from dataclasses import dataclass

from primeslurm.families.shape import DeltaNets, Mamba, Mla, ModelShape, Vision


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    embedding: int
    """Token embedding."""
    head: int
    """Output projection; 0 if it is the embedding."""
    attention: int
    """Attention, Mamba and delta nets of all layers."""
    dense: int
    """Dense feed-forward networks and shared experts of all layers."""
    routers: int
    experts: int
    """Routed experts of all layers."""
    norms: int
    active_experts: int
    """Routed experts that one token passes."""
    vision: int
    """The encoder of images."""

    @property
    def language(self) -> int:
        """All but the encoder of images."""
        return self.embedding + self.head + self.attention + self.dense + self.routers + self.experts + self.norms

    @property
    def total(self) -> int:
        """All of them."""
        return self.language + self.vision

    @property
    def active(self) -> int:
        """Those in the matrix products of a token of text: the embedding is a look-up, unless it is the output too."""
        return self.language - self.experts + self.active_experts - (self.embedding if self.head else 0)

    @property
    def layers(self) -> int:
        """All of the language model but embedding and output."""
        return self.language - self.embedding - self.head


def count(facts: ModelShape) -> Parameters:
    """Count the parameters of a model."""
    ends = facts.vocab * facts.hidden
    matrices = 3 if facts.gated else 2
    experts = active = shared = routers = 0
    if facts.experts:
        e = facts.experts
        inside = e.latent or facts.hidden
        one = matrices * inside * e.width + (2 * e.width + inside if facts.expert_bias else 0)
        experts, active = (facts.moe_layers * n * one for n in (e.count, e.top_k))
        shared = facts.moe_layers * matrices * facts.hidden * e.shared_width
        shared += facts.moe_layers * 2 * facts.hidden * e.latent if e.latent else 0
        routers = facts.moe_layers * facts.hidden * e.count
    mamba = facts.mamba.layers * _mamba(facts.mamba, facts.hidden) if facts.mamba else 0
    nets = facts.delta_nets.layers * _delta_net(facts.delta_nets, facts.hidden) if facts.delta_nets else 0
    return Parameters(
        embedding=ends,
        head=0 if facts.tied else ends,
        attention=facts.attention_layers * _attention(facts) + mamba + nets,
        dense=facts.dense_layers * matrices * facts.hidden * facts.dense_width + shared,
        routers=routers,
        experts=experts,
        norms=_norms(facts),
        active_experts=active,
        vision=_vision(facts.vision) if facts.vision else 0,
    )


def largest_layer(facts: ModelShape) -> tuple[int, int]:
    """Parameters of the largest layer: (routed experts, everything else)."""
    if facts.experts is None:
        rest = _attention(facts) + (3 if facts.gated else 2) * facts.hidden * facts.dense_width
        return 0, rest
    parameters = count(facts)
    shared = (3 if facts.gated else 2) * facts.hidden * facts.experts.shared_width
    attention = 0 if facts.mamba else _attention(facts)
    return parameters.experts // facts.moe_layers, attention + shared + facts.hidden * facts.experts.count


def _attention(facts: ModelShape) -> int:
    if facts.mla:
        return _latent_attention(facts, facts.mla)
    q, kv = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    bias = q + 2 * kv + (facts.hidden if facts.output_bias else 0) if facts.attention_bias else 0
    sinks = facts.heads if facts.sinks else 0
    return facts.hidden * (2 * q + 2 * kv + facts.attention_gate) + bias + sinks


def _latent_attention(facts: ModelShape, mla: Mla) -> int:
    query = facts.heads * (mla.nope + mla.rope)
    down = facts.hidden * (mla.q_rank + mla.kv_rank + mla.rope)
    up = (mla.q_rank or facts.hidden) * query + mla.kv_rank * facts.heads * (mla.nope + mla.value)
    indexer = 0
    if facts.indexer:
        i = facts.indexer
        indexer = mla.q_rank * i.heads * i.dim + facts.hidden * (i.dim + i.heads)
    return down + up + facts.heads * mla.value * facts.hidden + indexer


def _mamba(mamba: Mamba, hidden: int) -> int:
    inner, mixed = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    return hidden * (2 * inner + mixed + mamba.heads) + inner * hidden + (inner + mixed) * (mamba.conv + 1)


def _delta_net(nets: DeltaNets, hidden: int) -> int:
    keys, values = nets.key_heads * nets.key_dim, nets.value_heads * nets.value_dim
    return hidden * (2 * keys + 3 * values + 2 * nets.value_heads) + (2 * keys + values) * nets.conv


def _norms(facts: ModelShape) -> int:
    per_layer = 1 if facts.mamba else 2
    heads = 2 * facts.head_dim if facts.qk_norm else 0
    ranks = facts.mla.q_rank + facts.mla.kv_rank if facts.mla else 0
    return facts.hidden * (per_layer * facts.layers + 1) + facts.attention_layers * (heads + ranks)


def _vision(vision: Vision) -> int:
    """Linear layers and norms have biases. Patches that become one token pass a network as wide as they are together,
    one for each output."""
    hidden, width, merged = vision.hidden, vision.width, vision.hidden * vision.patches
    block = 4 * hidden * (hidden + 1) + 2 * hidden * width + width + hidden + 4 * hidden
    embedding = hidden * (vision.patch_values + 1) + hidden * vision.positions
    merger = merged * (merged + 1) + (merged + 1) * vision.out
    norms = 2 * hidden + (vision.outputs - 1) * 2 * merged
    return vision.depth * block + embedding + vision.outputs * merger + norms
