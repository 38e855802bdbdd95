"""Model family: GLM-4.5 to GLM-4.7, and INTELLECT-3."""
