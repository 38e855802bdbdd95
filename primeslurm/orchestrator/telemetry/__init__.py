"""Measurements of the orchestrator: progress, stalls, failures, load of engines, metrics of batches."""
