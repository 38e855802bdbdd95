"""One node's agent: it starts, watches and ends the node's processes."""
