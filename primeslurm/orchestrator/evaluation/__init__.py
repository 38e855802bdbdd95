"""Evaluations of the policy: their schedule, rollouts, results and files."""
