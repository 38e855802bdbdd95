"""Model family: Qwen3.5 and later."""
