"""Node assignment: resources that each role requests, and the processes of each node."""
