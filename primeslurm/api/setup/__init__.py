"""What a user does before the first run: install, describe the cluster, choose a recipe."""
