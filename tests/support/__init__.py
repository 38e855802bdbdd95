"""What several test suites use."""
