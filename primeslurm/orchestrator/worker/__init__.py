"""The environment worker: a process that runs the rollouts of one verifiers environment."""
