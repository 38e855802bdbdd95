"""Rules about Hugging Face tensor names on which trainer and engines must agree: FP8, draft layers, stacks."""

from __future__ import annotations

import re
from collections.abc import Collection

FP8_SCALE = "_scale_inv"  # suffix that turns the name of an FP8 weight into the name of its scales
_PRODUCTS = re.compile(
    r"(^|\.)(?!eh_proj|weights_proj)"
    r"(experts\..*|\w+_proj|kv_a_proj_with_mqa|in_proj_qkv|in_proj_z|indexer\.wq_b)\.weight$"
)
_STACK = re.compile(r"(.+\.experts)\.(?:gate_up|(down))_proj")


def in_fp8(name: str) -> bool:
    """Return whether an FP8 model stores the weight `name` in FP8.

    Projections and experts are in FP8. Small or sensitive weights keep full precision, in engines too: embeddings, head
    and norms; routers and the gate of shared experts; convolution, decay and step sizes of Mamba and delta nets; draft
    layers; vision encoders; and all of a sparse-attention indexer but its queries.
    """
    return _PRODUCTS.search(name) is not None


def layers_ahead(layers: int, ahead: int) -> re.Pattern[str]:
    """Return a pattern of the tensor names of draft layers, which only speculative decoding reads.

    `ahead` is the number of draft layers after the `layers` of the model. A module `mtp` always matches.
    """
    numbers = "|".join(str(layers + index) for index in range(ahead))
    return re.compile(rf"(model\.layers\.({numbers})|mtp)\..*")


def absent(expected: Collection[str], names: Collection[str]) -> set[str]:
    """Return the expected names that are missing. A stack of experts may also be present expert by expert."""
    return {name for name in expected if name not in names and not _has_single_experts(name, names)}


def _has_single_experts(name: str, names: Collection[str]) -> bool:
    stack = _STACK.fullmatch(name)
    parts = () if stack is None else ("down",) if stack[2] else ("gate", "up")
    return stack is not None and all(f"{stack[1]}.0.{part}_proj.weight" in names for part in parts)
