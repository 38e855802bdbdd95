"""What a model is made of, as far as memory and compatibility need it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: ranks of the compressed query and KV, and head sizes."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class IndexerShape:
    """The lightning indexer of sparse attention (DSA)."""

    heads: int
    dim: int
    top_k: int
    """Keys that it selects for a token."""
    layers: int
    """That have one of their own; the others take the selection of the layer before."""


@dataclass(frozen=True)
class Mamba:
    """Mamba-2 layers of a hybrid model."""

    layers: int
    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int
    chunk: int
    """Positions that are computed at once."""


@dataclass(frozen=True)
class DeltaNets:
    """Gated delta nets, in place of attention in some layers."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    """Of one head."""
    value_dim: int
    """Of one head."""
    conv: int


@dataclass(frozen=True)
class ExpertShape:
    """The mixture of experts of a layer."""

    count: int
    top_k: int
    width: int
    """Intermediate size of one expert."""
    shared_width: int
    """Intermediate size of the shared experts together; 0 without."""
    latent: int | None
    """Width that experts compute in, where it is not the model's."""


@dataclass(frozen=True)
class Vision:
    """The encoder of images beside a language model."""

    depth: int
    """Blocks."""
    hidden: int
    width: int
    """Intermediate size of a block."""
    patch_values: int
    """Numbers that a patch of an image consists of."""
    patches: int
    """Patches that a token stands for."""
    positions: int
    """Places that have an embedding."""
    out: int
    """Width of what it makes of a token."""
    outputs: int
    """How often it makes something of a token: once, and once more for each layer that hands on its own features."""


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, as far as memory and compatibility need it."""

    model_type: str
    """Of its config."""
    hidden: int
    vocab: int
    max_positions: int | None
    heads: int
    kv_heads: int
    head_dim: int
    attention_layers: int
    window: int | None
    """Sliding window in tokens of `window_layers` of the attention layers."""
    window_layers: int
    dense_layers: int
    """Layers with a dense feed-forward network."""
    dense_width: int
    expert_layers: tuple[int, ...]
    """Indices of the layers with experts, among all layers."""
    experts: ExpertShape | None
    gated: bool
    """Feed-forward networks have three matrices instead of two."""
    attention_gate: int
    """How many values of a layer scale its attention's output."""
    attention_bias: bool
    qk_norm: bool
    """Queries and keys of each head are normalised."""
    tied: bool
    mla: Mla | None = None
    indexer: IndexerShape | None = None
    mamba: Mamba | None = None
    delta_nets: DeltaNets | None = None
    vision: Vision | None = None
    quantization: str | None = None
    """How the checkpoint's weights are stored: fp8, int4, mxfp4; None for the model's dtype."""
    fp8_blocks: bool = False
    """Stored in E4M3 with one scale for each block of 128 x 128 weights."""
    output_bias: bool = False
    """With `attention_bias`: behind attention, too."""
    post_norms: bool = False
    """Both halves of a layer have a norm behind them, too."""
    expert_bias: bool = False
    sinks: bool = False
    """Each head of attention has a sink."""
    fp8_powers: bool = False
    """These scales are powers of two (UE8M0)."""
    four_bits: str | None = None
    """The format in four bits that the checkpoint is stored in, if the trainer reads it: int4 or mxfp4."""
    sees: bool = False
    """There is an encoder of images, whose sizes may not be known here (`vision`)."""

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return len(self.expert_layers)

    @property
    def layers(self) -> int:
        """Decoder layers, counted as the model's config does."""
        if self.mamba:
            return self.attention_layers + self.dense_layers + self.moe_layers + self.mamba.layers
        return self.attention_layers + (self.delta_nets.layers if self.delta_nets else 0)
