"""Rollout groups and their files, and the jobs by which environment workers make rollouts."""
