"""Turn a recipe and a site into a Plan (roles, placement, ports, commands), check it, and estimate its memory."""
