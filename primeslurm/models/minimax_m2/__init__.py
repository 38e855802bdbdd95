"""Model family: MiniMax-M2."""
