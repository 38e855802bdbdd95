"""AFMoE (Arcee Trinity)."""
