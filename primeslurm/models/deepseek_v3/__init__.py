"""Model family: DeepSeek-V3 and R1."""
