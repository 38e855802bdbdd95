"""Steps before the first run: install, describe the cluster, choose a recipe."""
