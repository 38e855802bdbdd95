"""Weights in Hugging Face format: loading, quantization, export and conversion."""
