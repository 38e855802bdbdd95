"""Qwen3 vl."""
