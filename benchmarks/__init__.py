"""Benchmarks: one module per measurement."""
