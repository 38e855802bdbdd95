"""Floating-point operations of a training step, for every family, from the shape of the model. Pure, without torch.

The convention is that of model FLOPs (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B);
docs/reference/metrics.md states it for users. Only products of matrices count, two operations per multiplication and
addition. A backward pass costs twice the forward pass, whatever is computed again. A query meets the keys that it sees,
a token the experts that it is routed to, and only trained tokens have logits. Recurrences are counted token by token,
although chunked kernels compute more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from primeslurm.models.shape import DeltaNets, Mamba, ModelShape, Vision


@dataclass(frozen=True)
class Work:
    """Counts of a batch from which its operations follow. Works of several rows or ranks can be added."""

    tokens: int = 0
    """Tokens that pass the layers."""
    trained: int = 0
    """Tokens whose logits are computed."""
    pairs: int = 0
    """Pairs of a query and a key that attention computes, without windows and selection."""
    windowed_pairs: int = 0
    """Pairs of a query and a key in layers with a sliding window."""
    selected_pairs: int = 0
    """Pairs of a query and a key in layers whose indexer selects the keys."""
    patches: float = 0
    """Image patches that pass the vision encoder."""
    patch_pairs: float = 0
    """Pairs of patches of the same image."""

    @classmethod
    def of(cls, positions: NDArray[np.integer], shape: ModelShape, trained: int = 0) -> Work:
        """Count tokens and pairs. `positions` are the indices of the tokens in their documents, in any shape."""
        seen = positions.astype(np.int64) + 1

        def at_most(limit: int | None) -> int:
            return int((seen if limit is None else np.minimum(seen, limit)).sum())

        top_k = shape.indexer.top_k if shape.indexer else None
        return cls(seen.size, trained, at_most(None), at_most(shape.window), at_most(top_k))

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Work)))


@dataclass(frozen=True)
class Flops:
    """Operations of one forward pass, grouped by the gradients that the backward pass computes for them."""

    trained: float = 0.0
    """Products with trained weights, and products of two activations: both factors get a gradient."""
    frozen: float = 0.0
    """Products with frozen weights: only the activation gets a gradient."""
    leaves: float = 0.0
    """Products of trained weights with an input, which gets no gradient."""
    forward_only: float = 0.0

    @property
    def step(self) -> float:
        """Return the operations of forward and backward pass together."""
        return 3 * self.trained + 2 * (self.frozen + self.leaves) + self.forward_only


def flops(shape: ModelShape, work: Work, *, adapters: int | None = None, trains_vision: bool = False) -> Flops:
    """Return the operations of one forward pass. `Flops.step` adds those of the backward pass.

    Args:
        adapters: Weights of LoRA adapters that a token meets. None: all weights are trained, without adapters.
    """
    products = 2.0 * (layer_weights(shape) * work.tokens + shape.hidden * shape.vocab * work.trained)
    states = _attention(shape, work) + _recurrences(shape) * work.tokens
    indexer = _indexer(shape, work)
    vision = _vision(shape.vision, work, trains_vision) if shape.vision else Flops()
    trained, frozen = (products, 0.0) if adapters is None else (2.0 * adapters * work.tokens, products)
    return Flops(trained + states + vision.trained, frozen, vision.leaves, indexer + vision.forward_only)


def draft_flops(shape: ModelShape, work: Work) -> Flops:
    """Return the operations of a trained draft layer. Its input has no gradient, and the model's head is frozen."""
    indexer = replace(shape.indexer, layers=1) if shape.indexer else None
    layer = replace(
        shape,
        attention_layers=1,
        dense_layers=0 if shape.experts else 1,
        expert_layers=shape.expert_layers[-1:],
        delta_nets=None,
        indexer=indexer,
    )
    inner = flops(layer, replace(work, trained=0))
    head = 2.0 * shape.hidden * shape.vocab * work.trained
    return replace(inner, frozen=head, leaves=2.0 * 2 * shape.hidden**2 * work.tokens)


def layer_weights(shape: ModelShape) -> int:
    """Return the weights of all layers in whose products a token takes part. The indexer's are not among them."""
    matrices = 3 if shape.gated else 2
    weights = _projections(shape) + shape.dense_layers * matrices * shape.hidden * shape.dense_width
    if e := shape.experts:
        inside = e.latent or shape.hidden
        routed = e.top_k * matrices * inside * e.width + (2 * shape.hidden * e.latent if e.latent else 0)
        shared = matrices * shape.hidden * e.shared_width
        weights += shape.moe_layers * (routed + shared + shape.hidden * e.count)
    if shape.mamba:
        weights += shape.mamba.layers * _mamba(shape.mamba, shape.hidden)
    if shape.delta_nets:
        weights += shape.delta_nets.layers * _delta_net(shape.delta_nets, shape.hidden)
    return weights


def _projections(shape: ModelShape) -> int:
    """Return the number of weights of all layers' projections before and after attention or a recurrence."""
    if mla := shape.mla:
        query = shape.heads * (mla.nope + mla.rope)
        down = shape.hidden * (mla.q_rank + mla.kv_rank + mla.rope)
        up = (mla.q_rank or shape.hidden) * query + mla.kv_rank * shape.heads * (mla.nope + mla.value)
        return shape.attention_layers * (down + up + shape.heads * mla.value * shape.hidden)
    heads = sum(shape.query_heads)
    keys_and_values = 2 * shape.attention_layers * shape.kv_heads * shape.head_dim
    return shape.hidden * (2 * heads * shape.head_dim + keys_and_values + heads * shape.attention_gate // shape.heads)


def _mamba(mamba: Mamba, hidden: int) -> int:
    inner, mixed = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    return hidden * (2 * inner + mixed + mamba.heads) + inner * hidden


def _delta_net(nets: DeltaNets, hidden: int) -> int:
    keys, values = nets.key_heads * nets.key_dim, nets.value_heads * nets.value_dim
    return hidden * (2 * keys + 3 * values + 2 * nets.value_heads)


def _attention(shape: ModelShape, work: Work) -> float:
    """Return the operations of attention itself: queries times keys, and softmax weights times values."""
    if shape.mla and shape.indexer:
        # Absorbed: all heads share the compressed keys, which are also the values.
        width = 2 * shape.mla.kv_rank + shape.mla.rope
        return 2.0 * shape.attention_layers * shape.heads * width * work.selected_pairs
    mla = shape.mla
    width = mla.nope + mla.rope + mla.value if mla else 2 * shape.head_dim
    full, windowed = shape.query_heads
    return 2.0 * width * (full * work.pairs + windowed * work.windowed_pairs)


def _indexer(shape: ModelShape, work: Work) -> float:
    if shape.indexer is None or shape.mla is None:
        return 0.0
    i = shape.indexer
    weights = shape.mla.q_rank * i.heads * i.dim + shape.hidden * (i.dim + i.heads)
    return 2.0 * i.layers * (weights * work.tokens + i.heads * i.dim * work.pairs)


def _recurrences(shape: ModelShape) -> float:
    """Return the operations per token of recurrent layers: state spaces update and read, delta rules also look up."""
    m, d = shape.mamba, shape.delta_nets
    spaces = 2 * 2.0 * m.layers * m.heads * m.head_dim * m.state if m else 0.0
    nets = 3 * 2.0 * d.layers * d.value_heads * d.value_dim * d.key_dim if d else 0.0
    return spaces + nets


def _vision(vision: Vision, work: Work, trained: bool) -> Flops:
    merged = vision.hidden * vision.patches
    block = 4 * vision.hidden**2 + 2 * vision.hidden * vision.width
    mergers = vision.outputs * merged * (merged + vision.out) / vision.patches
    attention = vision.depth * 2 * 2.0 * vision.hidden * work.patch_pairs
    inner = 2.0 * (vision.depth * block + mergers) * work.patches + attention
    pixels = 2.0 * vision.hidden * vision.patch_values * work.patches
    return Flops(trained=inner, leaves=pixels) if trained else Flops(forward_only=inner + pixels)
