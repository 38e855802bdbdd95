"""Maple, a made-up family: Qwen3 by another name."""
