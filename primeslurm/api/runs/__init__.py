"""Status, logs, export and other functions of submitted runs."""
