"""Sizes of the blocks that kernels and layers compute in. The planner reads them, so this module imports no torch."""

from __future__ import annotations

# Rows and columns of the block of an FP8 weight that shares one scale
FP8_BLOCK = 128
# Tokens, over all rows, that a recurrent layer computes at once. The backward pass recomputes each segment.
SEGMENT_TOKENS = 2048
# The same on GPUs with kernels for the recurrence. They store less per token, and short segments would spend more time
# on kernel launches than on computation.
KERNEL_SEGMENT_TOKENS = 16384
# Positions that a gated delta net computes at once within a segment. It affects speed only.
DELTA_CHUNK = 64
