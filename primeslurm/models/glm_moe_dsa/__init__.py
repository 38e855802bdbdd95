"""Model family: GLM-5 and GLM-5.1."""
