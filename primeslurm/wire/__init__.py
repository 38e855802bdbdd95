"""Data that processes exchange: batches, weights, checkpoints, and the transport of messages."""
