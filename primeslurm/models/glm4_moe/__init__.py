"""Glm4 moe."""
