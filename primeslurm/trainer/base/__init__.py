"""Modules that the whole trainer uses: the interrupt signal, the phase timer, and drafts of models."""
