"""Llama 2 and 3, and the models that share their architecture."""
