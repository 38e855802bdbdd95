"""The agent of one node: it starts, watches, restarts and ends the node's processes."""
