"""Trainer checkpoints: saving, committing and restoring them, and exporting one as a Hugging Face model."""
