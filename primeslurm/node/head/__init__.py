"""The head: it watches all agents, assigns nodes, and decides about restarts across nodes and about the end."""
