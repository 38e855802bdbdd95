"""Model family: Llama 2 and 3, and models with their architecture."""
