"""Model family: Qwen3 and Qwen3-MoE."""
