"""The machine below an agent: network, fabric, shared memory, local directories and processes."""
