"""Glm moe dsa."""
