"""MiniMax-M2."""
