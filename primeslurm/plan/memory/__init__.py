"""What fits: parameters, activations, KV cache, and the estimate made of them."""
