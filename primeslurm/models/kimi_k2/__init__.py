"""Kimi k2."""
