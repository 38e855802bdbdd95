"""Kimi-K2."""
