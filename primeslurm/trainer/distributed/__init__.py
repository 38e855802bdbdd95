"""Ranks, and how rows and tokens are spread over them."""
