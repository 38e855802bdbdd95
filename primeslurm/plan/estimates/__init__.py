"""Estimates of what a run needs: parameters, activations, KV cache, checkpoints and step time."""
