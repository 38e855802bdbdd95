"""Fakes of engines and trainer ranks that tests and benchmarks share."""
