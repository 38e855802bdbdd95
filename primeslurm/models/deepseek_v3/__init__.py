"""Deepseek v3."""
