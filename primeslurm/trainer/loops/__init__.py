"""The RL and SFT training loops."""
