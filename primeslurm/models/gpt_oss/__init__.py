"""Model family: gpt-oss."""
