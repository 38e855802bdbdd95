"""The policy on this rank: the sharded model, and the training step with its metrics."""
