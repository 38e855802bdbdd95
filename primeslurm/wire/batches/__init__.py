"""Rollouts and batches: what a token has, as arrays, messages and files."""
