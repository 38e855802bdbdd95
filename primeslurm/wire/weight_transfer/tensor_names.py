"""Names of tensors in checkpoints and transfers, in Hugging Face format: both ends have to read them alike."""

from __future__ import annotations

import re
from collections.abc import Collection

FP8_SCALE = "_scale_inv"
"""What follows the name of an FP8 weight in the name of its scales."""
_PRODUCTS = re.compile(
    r"(^|\.)(?!eh_proj|weights_proj)"
    r"(experts\..*|\w+_proj|kv_a_proj_with_mqa|in_proj_qkv|in_proj_z|indexer\.wq_b)\.weight$"
)
_STACK = re.compile(r"(.+\.experts)\.(?:gate_up|(down))_proj")


def in_fp8(name: str) -> bool:
    """Whether a weight of this name in a checkpoint is an operand of FP8 products, where anything is.

    Projections and experts are. What stays in full precision is small or sensitive, and engines keep it so, too:
    embeddings, head and norms; routers and the gate of shared experts; of Mamba and delta nets the convolution, decay
    and step sizes; of sparse attention's indexer all but its queries; what drafts further tokens; what sees images.
    """
    return _PRODUCTS.search(name) is not None


def layers_ahead(layers: int, ahead: int) -> re.Pattern[str]:
    """Make a pattern of the names of a checkpoint's tensors for tokens further ahead.

    They draft for speculative decoding; neither training nor an engine without drafts reads them.

    Args:
        layers: how many layers the model has without them.
        ahead: how many there are beyond these; a module `mtp` matches in any case.
    """
    numbers = "|".join(str(layers + index) for index in range(ahead))
    return re.compile(rf"(model\.layers\.({numbers})|mtp)\..*")


def absent(expected: Collection[str], found: Collection[str]) -> set[str]:
    """Find the names that are not there.

    What one checkpoint stacks, another may hold expert by expert: such a stack counts as found.

    Args:
        expected: names that must be there.
        found: names that are there.
    """
    return {name for name in expected if name not in found and not _one_by_one(name, found)}


def _one_by_one(name: str, found: Collection[str]) -> bool:
    """Whether the first expert of a stack is there by itself."""
    stack = _STACK.fullmatch(name)
    parts = () if stack is None else ("down",) if stack[2] else ("gate", "up")
    return stack is not None and all(f"{stack[1]}.0.{part}_proj.weight" in found for part in parts)
