"""Model family: DeepSeek-V3.2."""
