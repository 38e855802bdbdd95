"""Nemotron h."""
