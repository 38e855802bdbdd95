"""Testbed."""
