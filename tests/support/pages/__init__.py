"""Executes the code blocks of documentation pages in order, as a reader would."""
