"""Code that benchmarks share with each other and with tests."""
