"""What a run is doing, for people and scripts."""
