"""Patches of vLLM for engines on CPUs."""
