"""A tenant's run: its gateway to the deployment's engines, and its trainer, whose passes a Tinker service computes."""
