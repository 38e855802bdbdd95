"""Generic."""
