"""Everything the rest of the code knows about a model family, in one record without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Capabilities:
    """Features that the trainer supports for a model type. Every True has a test."""

    ep: bool = False
    """Expert parallelism."""
    cp: bool = False
    """Context parallelism."""
    fp8: bool = False
    """Block-scaled FP8 matrix products."""
    lora: bool = False
    """Adapters on linear layers, and on SwiGLU experts without biases."""
    engine_lora: frozenset[str] = frozenset()
    """Layers on which vLLM can apply adapters at run time."""
    router_replay: bool = False
    head_chunks: bool = True
    """Logits computed in chunks of tokens."""
    head_dtype: bool = True
    """Logits in another dtype than the model's."""
    fp8_checkpoint: bool = False
    """Checkpoints in E4M3 with one scale per block of 128 x 128 weights can be loaded."""
    int4_checkpoint: bool = False
    """Checkpoints with experts in the packed INT4 format of compressed-tensors can be loaded."""
    mxfp4_checkpoint: bool = False
    """Checkpoints with experts in MXFP4 can be loaded."""
    draft_layer: bool = False
    """The draft layer (MTP) of a checkpoint can be trained."""
    images: bool = False
    """The model has a vision encoder that can be trained on."""
    compile: bool = False
    """Layers can be compiled by torch.compile."""
    compiled_with: frozenset[str] | None = None
    """Modes (`fp8`, `lora`, `router_replay`, `cp` as Ulysses), beside plain bfloat16, in which layers are compiled by
    default, because it was faster on GPUs with documents of changing lengths. None: only if the recipe asks."""
    prefix_sharing: bool = False
    """Documents with the same prompt can share its tokens in a row."""
    offload: bool = True
    """Activations, or master weights and optimizer state, can be kept in host memory."""


# The code of transformers, sharded by FSDP. It reads images in the way of Qwen2-VL.
GENERIC = Capabilities(head_chunks=False, head_dtype=False, offload=False, images=True)
# Capabilities of most dense families
DENSE = Capabilities(cp=True, fp8=True, lora=True, fp8_checkpoint=True)
# Capabilities of most families with experts
MOE = replace(DENSE, ep=True, router_replay=True)


class Parsers(NamedTuple):
    """Names of vLLM's parsers of tool calls and thoughts, or None.

    Only clients that send messages need them: training sends and receives token ids.
    """

    tool_call: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class VisionDefaults:
    """Defaults of transformers for fields that the config of a vision encoder omits."""

    sizes: Mapping[str, int]
    """Default sizes by name of the config's field."""
    deepstack: tuple[int, ...]
    """Encoder layers whose features are added to the decoder's hidden states (DeepStack)."""


@dataclass(frozen=True)
class Traits:
    """Properties of a family's shape that its configs do not state."""

    qk_norm: bool = False
    """Queries and keys of each head are normalized."""
    attention_gate: Literal["head", "element"] | None = None
    """Whether a gate scales attention's output per head or per value."""
    post_norms: bool = False
    """The outputs of attention and feed-forward network are normalized too."""
    output_bias: bool = False
    """If attention has biases, its output projection has one."""
    expert_bias: bool = False
    expert_stacks: bool = False
    """The adapter keeps the experts of a layer in one tensor, as the checkpoints do."""
    sinks: bool = False
    """Each attention head has a learned logit that absorbs attention (a sink)."""
    vision: VisionDefaults | None = None
    """None if the family runs no vision encoder."""


@dataclass(frozen=True)
class RendererTraits:
    """Deviations of a renderer of `renderers` 0.1.12 from the chat template of its models."""

    newline_between_calls: tuple[str, str] | None = None
    """(end of call, start of call): the template puts a line break between the two, and the renderer does not."""
    newline_after_turn: str | None = None
    """Token that ends a turn: the template puts a line break after it, and the renderer's bridge does not."""
    setup: str | None = None
    """Import path, as `module:function`, of a context manager in which the renderer is built from a tokenizer."""
    replaces_template: bool = False
    """The renderer is authoritative: do not compare it with the chat template."""
    describes_tools: bool = False
    """The renderer shows tools, although the template shows none."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A group of models that share an architecture, and what the trainer and engines support for them."""

    name: str
    """Name of the family's folder in `primeslurm.models`."""
    model_types: Mapping[str, Capabilities]
    """Each `model_type` of config.json, with what the trainer's own implementation supports."""
    builder: str | None = None
    """Import path of the module with the function `spec`. Default: `model`, beside the module of this record."""
    traits: Traits = Traits()
    parsers: Mapping[str, Parsers] = field(default_factory=dict)
    """vLLM's parsers, by a regular expression that is searched in the model's lower-case name."""
    renderer: str | None = None
    """Name of the family's renderer in the package `renderers`, or `module:Class`. None if there is none."""
    renderers: Mapping[str, str] = field(default_factory=dict)
    """Renderers of models with another chat template, by a regular expression as in `parsers`."""
    renderer_traits: Mapping[str, RendererTraits] = field(default_factory=dict)
    """Deviations from the chat template, by name of the renderer."""
    lora_targets: frozenset[str] = frozenset()
    """Layers, over all model types, that recipes may name for adapters."""


ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
SWIGLU = frozenset({"gate_proj", "up_proj", "down_proj"})
EXPERTS = frozenset({"experts"})
# Projections of multi-head latent attention
LATENT = frozenset({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"})
