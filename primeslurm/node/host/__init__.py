"""The machine under a node: network, fabric, shared memory, processes."""
