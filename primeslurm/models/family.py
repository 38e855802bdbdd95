"""What is known of a family of models, all of it in one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Capabilities:
    """What the trainer can do with a model type. Every True has a test."""

    ep: bool = False
    """Experts spread over ranks."""
    cp: bool = False
    """Sequences split over ranks."""
    fp8: bool = False
    """Block-scale FP8 matrix products."""
    lora: bool = False
    """Adapters on linear layers, and on experts that are SwiGLU without biases."""
    router_replay: bool = False
    head_chunks: bool = True
    """Logits in chunks of tokens."""
    fp8_checkpoint: bool = False
    """Checkpoints in E4M3 with one scale for each block of 128 x 128 weights load."""
    int4_checkpoint: bool = False
    """Checkpoints with experts in compressed-tensors' packed INT4 load."""
    mxfp4_checkpoint: bool = False
    """Checkpoints with experts in MXFP4 load."""
    images: bool = False
    """A vision encoder beside the language model."""
    compile: bool = False
    """Layers compiled by torch.compile."""
    compiled_with: frozenset[str] | None = None
    """Modes (`fp8`, `lora`, `router_replay`, `cp` as Ulysses) in which compiled layers have run on GPUs with documents
    of changing lengths, and were faster: those are compiled unless a recipe says no. None: a recipe has to ask."""
    offload: bool = True
    """Activations, or masters and optimizer state, in host memory."""


GENERIC = Capabilities(head_chunks=False, offload=False, images=True)
"""The implementation in transformers: sharded by FSDP, and nothing else. It reads images as Qwen2-VL does."""


class Parsers(NamedTuple):
    """vLLM's names of what parses tool calls and thoughts in a model's text; None where it has none.

    Training does not need them: rollouts are token ids in and out. They serve clients that send messages.
    """

    tool_call: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class VisionDefaults:
    """What transformers takes for what the config of a vision encoder leaves out."""

    sizes: Mapping[str, int]
    """By their names in the config."""
    deepstack: tuple[int, ...]
    """Layers that hand on features of their own."""


@dataclass(frozen=True)
class Traits:
    """What the shape of a family's models has, and their configs do not say."""

    qk_norm: bool = False
    """Queries and keys of each head are normalised."""
    attention_gate: Literal["head", "element"] | None = None
    """What a gate scales: what a head of attention puts out, or each value of it."""
    post_norms: bool = False
    """What attention and feed-forward networks put out is normalised, too."""
    output_bias: bool = False
    """Attention that has biases has one behind it, too."""
    expert_bias: bool = False
    expert_stacks: bool = False
    """The trainer names the experts of a layer together, as checkpoints have them in stacks."""
    sinks: bool = False
    """Each head has a logit that takes attention from tokens."""
    vision: VisionDefaults | None = None
    """None if no encoder of images is run."""


@dataclass(frozen=True)
class RendererTraits:
    """What a renderer does, or forgets, beside the chat template of its models."""

    calls_apart: tuple[str, str] | None = None
    """End and beginning of calls that the template has a line break between, which `renderers` 0.1.12 forgets."""
    line_after: str | None = None
    """End of a turn that the template has a line break after, which `renderers` 0.1.12 forgets in its bridge."""
    harmony: bool = False
    """It is OpenAI's encoder, which reads its vocabulary from a file; the chat template is a copy that differs."""
    describes_tools: bool = False
    """It shows tools as the model's makers describe it; the template shows none."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that share an architecture."""

    name: str
    """The name of its module here, and of that in `primeslurm.models.model_builder` which builds it."""
    model_types: Mapping[str, Capabilities]
    """`model_type` of config.json to what works with the trainer's own implementation of it."""
    builder: str | None = None
    """Import path of the module that builds it, for a family that is no part of this package."""
    traits: Traits = Traits()
    parsers: Mapping[str, Parsers] = field(default_factory=dict)
    """By a pattern in the name of a model, in lower case."""
    renderer: str | None = None
    """What the package `renderers` calls the way from messages to tokens, or `module:Class`; None: there is none."""
    renderers: Mapping[str, str] = field(default_factory=dict)
    """Others, by a pattern in the name of a model, in lower case: not all of a family have one chat template."""
    renderer_traits: Mapping[str, RendererTraits] = field(default_factory=dict)
    """Of those of its renderers that have any, by the renderer's name."""
    lora_targets: frozenset[str] = frozenset()
    """Layers that recipes may name for adapters, over all of its model types."""


ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
SWIGLU = frozenset({"gate_proj", "up_proj", "down_proj"})
EXPERTS = frozenset({"experts"})
LATENT = frozenset({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"})
"""Of multi-head latent attention."""
