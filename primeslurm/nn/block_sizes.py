"""Sizes of the blocks that kernels and layers compute in.

The planner reads them for its memory estimates, so this module imports no torch.
"""

from __future__ import annotations

FP8_BLOCK = 128
"""Rows and columns of the block of an FP8 weight that shares one scale."""
SEGMENT_TOKENS = 2048
"""Tokens, over all rows, that a recurrent layer computes at once. The backward pass recomputes each segment."""
KERNEL_SEGMENT_TOKENS = 16384
"""The same on GPUs with kernels for the recurrence. They store less per token, and short segments would spend more time
on kernel launches than on computation."""
DELTA_CHUNK = 64
"""Positions that a gated delta net computes at once within a segment. It affects speed only."""
