"""Weights in Hugging Face format: read, encoded, exported."""
