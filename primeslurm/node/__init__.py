"""Everything that runs on a node besides the processes of the Plan: its agent, and on the first node the head."""
