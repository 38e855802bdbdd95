"""Model family: Kimi-K2.5 to K2.7."""
