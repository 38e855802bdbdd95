"""The shape of a model, as far as memory estimates and compatibility checks need it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: ranks of the compressed query and KV, and sizes of a head's parts."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class IndexerShape:
    """Sizes of the lightning indexer of DeepSeek sparse attention (DSA)."""

    heads: int
    dim: int
    top_k: int
    """Keys that it selects per token."""
    layers: int
    """Layers with an indexer. The other layers reuse the selection of an earlier layer."""


@dataclass(frozen=True)
class Mamba:
    """Number and sizes of the Mamba-2 layers of a hybrid model."""

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
    """Number and sizes of gated delta nets, which replace attention in some layers. Sizes are per head."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int


@dataclass(frozen=True)
class ExpertShape:
    """Numbers and sizes of the experts of one layer."""

    count: int
    top_k: int
    width: int
    """Intermediate size of one expert."""
    shared_width: int
    """Total intermediate size of the shared experts; 0 if there are none."""
    latent: int | None
    """Hidden size of the experts if it differs from the model's."""


@dataclass(frozen=True)
class Vision:
    """Sizes of a model's vision encoder."""

    depth: int
    """Number of blocks."""
    hidden: int
    width: int
    """Intermediate size of a block."""
    patch_values: int
    """Input values per image patch."""
    patches: int
    """Patches per token."""
    positions: int
    """Number of position embeddings."""
    out: int
    """Features per image token: the decoder's hidden size."""
    outputs: int
    """Feature tensors per image: the final one, and one for each deepstack layer."""


@dataclass(frozen=True)
class ModelShape:
    """Layer counts and sizes of a model, independent of its weights."""

    model_type: str
    """`model_type` of config.json."""
    hidden: int
    vocab: int
    max_positions: int | None
    heads: int
    kv_heads: int
    head_dim: int
    attention_layers: int
    window: int | None
    """Sliding window of `window_layers` of the attention layers [tokens]."""
    window_layers: int
    dense_layers: int
    """Number of layers with a dense feed-forward network."""
    dense_width: int
    expert_layers: tuple[int, ...]
    """Indices of the layers with experts."""
    experts: ExpertShape | None
    gated: bool
    """Feed-forward networks have three matrices instead of two."""
    attention_gate: int
    """Number of gate values per layer that scale the output of attention."""
    attention_bias: bool
    qk_norm: bool
    """Queries and keys of each head are normalized."""
    tied: bool
    """Embedding and head share their weights."""
    mla: Mla | None = None
    indexer: IndexerShape | None = None
    mamba: Mamba | None = None
    delta_nets: DeltaNets | None = None
    vision: Vision | None = None
    quantization: str | None = None
    """Format of the checkpoint (fp8, int4, mxfp4, ...); None if it has the model's dtype."""
    fp8_blocks: bool = False
    """The checkpoint is in E4M3 with one scale per block of 128 x 128 weights."""
    output_bias: bool = False
    """If `attention_bias`, the output projection of attention has a bias too."""
    post_norms: bool = False
    """The outputs of attention and feed-forward network are normalized."""
    expert_bias: bool = False
    sinks: bool = False
    """Each attention head has a sink."""
    fp8_powers: bool = False
    """The scales of FP8 blocks are powers of two (UE8M0)."""
    four_bits: str | None = None
    """Four-bit format of the checkpoint if the trainer can read it: int4 or mxfp4."""
    has_vision: bool = False
    """The model has a vision encoder. `vision` is None if its sizes are unknown."""
    heads_by_window: tuple[int, int] | None = None
    """If layers have different numbers of query heads: the sums over layers without and with a sliding window."""
    draft_layers: int | None = None
    """Number of layers that draft tokens (MTP); None if the config does not say."""

    @property
    def with_draft_layer(self) -> ModelShape:
        """The shape with one layer more, which a draft layer (MTP) resembles: attention, and experts if there are."""
        indexer = replace(self.indexer, layers=self.indexer.layers + 1) if self.indexer else None
        longer = replace(self, attention_layers=self.attention_layers + 1, indexer=indexer)
        if self.experts:
            return replace(longer, expert_layers=(*self.expert_layers, self.layers))
        return replace(longer, dense_layers=self.dense_layers + 1)

    @property
    def query_heads(self) -> tuple[int, int]:
        """Query heads of all layers without a sliding window, and of all layers with one."""
        full_layers = self.attention_layers - self.window_layers
        return self.heads_by_window or (self.heads * full_layers, self.heads * self.window_layers)

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return len(self.expert_layers)

    @property
    def layers(self) -> int:
        """Number of decoder layers, as the model's config counts them."""
        if self.mamba:
            return self.attention_layers + self.dense_layers + self.moe_layers + self.mamba.layers
        return self.attention_layers + (self.delta_nets.layers if self.delta_nets else 0)
