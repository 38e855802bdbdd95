"""Readers of data from other processes and from files accept random changes without failing."""
