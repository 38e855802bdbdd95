"""Command lines of all planned processes: argv, environment, ports and files."""
