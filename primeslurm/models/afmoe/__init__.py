"""Model family: AFMoE (Arcee Trinity)."""
