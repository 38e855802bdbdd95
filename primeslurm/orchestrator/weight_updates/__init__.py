"""Weight updates: how the orchestrator brings engines to new policy versions."""
