"""What the orchestrator observes: metrics, load of the engines, stalls."""
