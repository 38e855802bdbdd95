"""Model family: Nemotron-H and Nemotron 3."""
