"""Kimi-K2.5 to K2.7."""
