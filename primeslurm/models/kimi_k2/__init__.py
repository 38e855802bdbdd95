"""Model family: Kimi-K2."""
