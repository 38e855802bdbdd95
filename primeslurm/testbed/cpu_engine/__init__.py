"""Fixes of vLLM on CPUs."""
