"""The state of a run, for people and scripts."""
