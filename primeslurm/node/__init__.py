"""What runs on each node of a job: the agent that starts and watches the node's processes, and the fleet's head."""
