"""What processes say to one another: rollouts, batches, versions, weights, checkpoints, events."""
