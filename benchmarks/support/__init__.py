"""What benchmarks share with one another and with the tests."""
