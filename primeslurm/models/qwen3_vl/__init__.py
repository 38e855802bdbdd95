"""Model family: Qwen3-VL and Qwen3-VL-MoE."""
