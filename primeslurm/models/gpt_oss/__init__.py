"""Gpt oss."""
