"""Deepseek v32."""
