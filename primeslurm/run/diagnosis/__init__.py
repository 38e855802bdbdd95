"""Failures of a run, their causes, and their fixes."""
