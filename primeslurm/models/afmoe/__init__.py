"""Afmoe."""
