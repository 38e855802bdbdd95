"""Commands of all planned processes: argv, environment, ports and files."""
