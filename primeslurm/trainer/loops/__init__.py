"""The loops: a step, RL, SFT."""
