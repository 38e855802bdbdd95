"""Rollouts and batches as arrays, wire messages and files."""
