"""Sizes that kernels and layers compute with. The planner reads them, so this module imports no torch."""

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
# Maximum size of the copies of all weights with which one rank computes instead of FSDP. A larger model computes long
# enough to hide FSDP's cost, and rather needs the memory.
ONE_RANK_COPY_BYTES = 4 << 30
