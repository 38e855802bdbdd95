"""Model family: Laguna."""
