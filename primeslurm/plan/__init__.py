"""Recipe and site to Plan: roles, placement, ports, environment and commands; checks of it, and its memory."""
