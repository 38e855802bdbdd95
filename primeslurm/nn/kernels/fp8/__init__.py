"""Numbers in block-scaled FP8: how they are made, and products of them."""
