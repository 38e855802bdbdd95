"""The teacher: a frozen model that scores sampled tokens."""
