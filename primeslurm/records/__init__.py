"""What processes write down: one module for each kind of file, which its writers and its readers share."""
