"""Tenants of a deployment (`task: tenants`): commands about them, and the process that runs them."""
