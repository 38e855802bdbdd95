"""What the orchestrator measures: progress, stalls, failures, load of engines, metrics of batches."""
