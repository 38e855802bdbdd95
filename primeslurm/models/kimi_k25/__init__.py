"""Kimi k25."""
