"""Between our parameter names and those of Hugging Face checkpoints."""
